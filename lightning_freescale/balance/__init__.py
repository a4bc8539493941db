"""Load balancing: what a sample costs, and which rank trains it."""

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.partition import fixed, loads, lower_bound, straggler, variable, zigzag

__all__ = ["CostModel", "fixed", "loads", "lower_bound", "straggler", "variable", "zigzag"]
