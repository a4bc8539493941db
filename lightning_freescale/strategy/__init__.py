"""The strategy for ``import lightning``."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_freescale.bubbles.monitor import BubbleMonitor
from lightning_freescale.strategy.strategy import FreeScaleMixin


class FreeScaleStrategy(FreeScaleMixin, DDPStrategy):
    __doc__ = FreeScaleMixin.__doc__
    _sigterm_exception = SIGTERMException
    _is_overridden = staticmethod(is_overridden)
    _monitor_type = BubbleMonitor


FreeScaleStrategy.register_strategies(StrategyRegistry)
