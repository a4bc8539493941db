"""What the benchmark scripts share.

- ``report``: command-line options, the header of a result, tables on the console.
- ``results``: reads the stored results; ``labels``: readable names for the keys in them.
- ``workload``: training batches with a known collision rate.
- ``variant_names``: names of the variants that are compared.
- ``attention_inputs``: histories and inputs of an attention; ``attention_kernels``: the kernels that are compared.
- ``rank_setup``: what every rank does first; ``lightning_trainer``: a Trainer that only trains.
- ``plots``: the style of the figures.
- ``simulator_validation``: simulated steps next to measured ones.
- ``simulator_costs``: costs of the H200 as a cluster that the simulator needs besides compute.
- ``gpu_cluster/``: one GPU as a cluster of one-GPU nodes.
- ``emulation/``: an emulated device and network for machines without a GPU.
- ``exchange/``: the comparison of embedding exchanges behind ``benchmarks.exposed``.
- ``training/``: the comparison of whole trainings behind ``benchmarks.end_to_end``, ``cannot_help`` and ``quality``.
- ``tables/``: the generated Markdown pages.
"""
