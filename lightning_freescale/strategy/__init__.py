"""Lightning's side: the strategy class, and what it needs between the Trainer and the layers below.

* ``strategy.py``: options, set-up and end of the strategy; ``step_hooks.py``: the hooks of a step; ``checkpoints/``: the
  hooks of checkpoints and their formats.
* ``pipeline.py``: takes batches from the user's loaders to the step. ``prefetch.py`` fetches them in advance, and
  ``prepared_batch.py`` holds a batch together with everything that belongs to it.
* ``connecting.py``: the ranks connect, with a limit. ``failure_watch.py``: remembers why another rank has ended, and ends the
  waits for it. ``peer_connections.py``: connections that break when a process ends. ``failing.py``: names the rank in errors of
  CUDA, and keeps the error of a training from being hidden.
* ``control.py``: headers of batches and agreement between ranks. ``signals.py``: SIGTERM and SLURM's requeue signal.
* ``sharded_model.py``: a model is sharded once. ``table_learning_rate.py``: its tables follow the user's schedulers.
  ``lookup_watch.py``: hands the rates to the tables before each look-up, and refuses backwards that would train in a validation.
  ``table_steps.py``: names what changes gradients or skips a step after the tables have been updated.
* ``expert_groups.py``: the process group over which events travel to the ranks of their experts.
* ``accumulation.py``: the micro-batches of gradient accumulation count as one large batch.
* ``true_precision.py``: the dense part in bfloat16, and the tables in their own type.
* ``loss_weighting.py``: ranks with different numbers of samples. ``refusals.py``: settings that cannot be exact.
* ``exchange_table.py``: the table of the documentation about what is prioritized, synchronous or refused.
* ``progress_bar.py``: values for the progress bar without a wait for the device.

This module defines the strategy for ``import lightning``. ``lightning_freescale.pytorch_lightning`` has its twin.
"""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_freescale.bubbles.monitor import BubbleMonitor
from lightning_freescale.strategy.checkpoints import plain_loading
from lightning_freescale.strategy.strategy import FreeScaleMixin


class FreeScaleStrategy(FreeScaleMixin, DDPStrategy):
    __doc__ = FreeScaleMixin.__doc__
    _sigterm_exception = SIGTERMException
    _is_overridden = staticmethod(is_overridden)
    _monitor_type = BubbleMonitor


FreeScaleStrategy.register_strategies(StrategyRegistry)
plain_loading.install("lightning")
