"""Load balancing: what a sample costs, and which rank trains it.

There are two ways to balance a global batch. Both use the same :class:`~.planner.Planner` on every rank.

* At the source: if the lengths of all samples are known, a sampler gives each rank its samples. Nothing is sent.
* By exchange: each rank loads its local batch, and the ranks exchange samples before the training needs the batch.

The flow of a batch, and the files in this folder:

* ``cost.py``: :class:`~.cost.CostModel`, the cost of a sample from its history length and its candidates.
* ``sample_sizes.py``: reads those lengths and candidate counts from a batch of any type.
* ``partition.py``: ``zigzag``, ``fixed`` and ``variable``, pure functions from costs to the rank of each sample.
* ``planner.py``: :class:`~.planner.Planner`, a cost model and a mode of partition in one immutable value.
* ``sampler.py``: ``GlobalBatchSampler``, balancing at the source.
* ``exchange/``: ``ExchangeLoader``, balancing by exchange of samples between ranks. The folder has its own overview.
* ``compute_timer.py``: ``ComputeTimer``, the compute time of each step on this rank.
* ``online_cost_fit.py``: ``OnlineCostFit``, fits the cost model to those times during training.
* ``autotune.py``: ``retune``, the share of the work of each rank from its speed, for the mode ``variable``.
* ``balancer.py``: ``Balancer``, the only class here that the strategy uses. It combines all of the above.
* ``errors.py``: the exceptions of this folder.
"""

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.partition import fixed, loads, lower_bound, straggler, variable, zigzag
from lightning_freescale.balance.planner import Planner

__all__ = ["CostModel", "Planner", "fixed", "loads", "lower_bound", "straggler", "variable", "zigzag"]
