"""Load balancing: what a sample costs, and which rank trains it."""

from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.partition import fixed, loads, lower_bound, straggler, variable, zigzag
from lightning_freescale.balance.planner import Planner

__all__ = ["CostModel", "Planner", "fixed", "loads", "lower_bound", "straggler", "variable", "zigzag"]
