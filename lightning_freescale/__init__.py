"""FreeScale for PyTorch Lightning: distributed training of sequence recommenders with the bubbles removed.

Importing this package registers the strategies ``"freescale"`` and ``"freescale_sync"``. On a machine without TorchRec only
:mod:`.inference` and :mod:`.serving` work, and everything else raises an error that says what to install.
"""

from __future__ import annotations

import contextlib

from lightning_freescale.runtime import collector as _collector  # its import begins the pause

# isort: split
from lightning_utilities.core import rank_zero as _rank_zero

from lightning_freescale.runtime import requirements as requirements  # imports TorchRec, so it comes first
from lightning_freescale.runtime import third_party_warnings as third_party_warnings

# isort: split
from lightning_freescale.runtime.errors import CheckpointError, ConfigurationError, FreeScaleError, InputError

if requirements.TORCHREC_PROBLEM is None:
    from lightning_freescale.bubbles.monitor import BubbleMonitor
    from lightning_freescale.data import SeqBatch, SeqRecDataModule
    from lightning_freescale.embedding.zero_collision.collection import ZeroCollision, zero_collision
    from lightning_freescale.strategy import FreeScaleStrategy
    from lightning_freescale.strategy.checkpoints.export import export
    from lightning_freescale.strategy.checkpoints.host_copies.options import HostCopies
    from lightning_freescale.strategy.checkpoints.incremental import Incremental
    from lightning_freescale.strategy.checkpoints.verify import last_checkpoint

    _messages = _rank_zero.log
    with contextlib.suppress(ModuleNotFoundError):  # pytorch_lightning comes with lightning, but may have been removed
        from lightning_freescale import pytorch_lightning as pytorch_lightning
    _rank_zero.log = _messages  # importing pytorch_lightning takes lightning's messages over, in another format
_collector.resume()

__version__ = "0.1.0"
__all__ = [
    "BubbleMonitor",
    "CheckpointError",
    "ConfigurationError",
    "FreeScaleError",
    "FreeScaleStrategy",
    "HostCopies",
    "Incremental",
    "InputError",
    "SeqBatch",
    "SeqRecDataModule",
    "ZeroCollision",
    "export",
    "last_checkpoint",
    "zero_collision",
]
if requirements.TORCHREC_PROBLEM is not None:
    __getattr__ = requirements.refusing(__name__, __all__)
    requirements.register_refusing_strategies(("freescale", "freescale_sync"))
