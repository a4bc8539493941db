"""CUDA graphs of the layers of HSTU: the kernels of one pass of a layer start in one call.

A pass of a layer has about ten kernels. For each of them the host computes arguments and calls the driver, and for short
histories this takes longer than the kernels do. A CUDA graph has the kernels and their arguments ready. Its kernels are the
same, so the values do not change.

A graph is for one number of rows and of histories, which repeat (:mod:`.even_rows`). The first batch of such a shape runs without
a graph, and its kernels are captured. Later batches of the shape run in the graphs.

Graphs read and write the same addresses each time. All graphs of a model share one :class:`Arena`, so they need about as much
memory as one batch. Therefore one batch at a time can use them. If a forward comes before the backward of another batch, it runs
without graphs. The gradients that leave the layers are new arrays, because others may keep them: the backward of the first norm
of a layer is not part of a graph, and the gradients of the parameters are copied.

The graphs of a model end together, because torch frees memory that all of them use when the first one ends (:mod:`.capture`).

* :mod:`.model`: the graphs of all layers; :mod:`.layer`: those of one layer; :mod:`.registry`: which models have graphs.
* :mod:`.turn`: the batch that uses the graphs; :mod:`.arena`: the memory that they share; :mod:`.capture`: captures of kernels.
"""
