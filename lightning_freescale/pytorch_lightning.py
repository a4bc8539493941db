"""The same classes for ``import pytorch_lightning``, whose base classes are not those of ``import lightning``."""

from __future__ import annotations

from pytorch_lightning import Callback, LightningDataModule, LightningModule
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.model_helpers import is_overridden

from lightning_freescale.bubbles.monitor import BubbleMonitorMixin
from lightning_freescale.data.datamodule import SeqRecDataMixin
from lightning_freescale.models.hstu import HSTUMixin
from lightning_freescale.strategy.checkpoints import plain_loading
from lightning_freescale.strategy.strategy import FreeScaleMixin

__all__ = ["HSTU", "BubbleMonitor", "FreeScaleStrategy", "SeqRecDataModule"]


class BubbleMonitor(BubbleMonitorMixin, Callback):  # type: ignore[misc]
    __doc__ = BubbleMonitorMixin.__doc__


class FreeScaleStrategy(FreeScaleMixin, DDPStrategy):  # type: ignore[misc]
    __doc__ = FreeScaleMixin.__doc__
    _sigterm_exception = SIGTERMException
    _is_overridden = staticmethod(is_overridden)
    _monitor_type = BubbleMonitor


class SeqRecDataModule(SeqRecDataMixin, LightningDataModule):  # type: ignore[misc]
    __doc__ = SeqRecDataMixin.__doc__


class HSTU(HSTUMixin, LightningModule):  # type: ignore[misc]
    __doc__ = HSTUMixin.__doc__


FreeScaleStrategy.register_strategies(StrategyRegistry)
plain_loading.install("pytorch_lightning")
