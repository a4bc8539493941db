"""The set-up of the default process group: it ends with a named error if a rank dies meanwhile."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_freescale.runtime import cpu_threads
from lightning_freescale.runtime.errors import FreeScaleError
from lightning_freescale.runtime.nccl_groups import leave_failures_to_us
from lightning_freescale.runtime.process_groups import (
    await_store,
    bounded_connect,
    describe_missing_ranks,
    is_connection_error,
    keep_from_forked_processes,
)
from lightning_freescale.strategy.control import Control

if TYPE_CHECKING:  # The mixin completes the DDPStrategy of either Lightning namespace.
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class BoundedSetup(_Base):
    """Lightning's hooks that connect the ranks, as a part of the strategy class."""

    _wait: timedelta  # The strategy's timeout.

    def __init__(self, **options: Any) -> None:
        # Lightning sets the variable later, when it starts the ranks.
        self._threads_were_chosen = cpu_threads.were_chosen()
        super().__init__(**options)

    def _declares_tables(self) -> bool:
        """Whether the model has tables. The strategy implements it."""
        raise NotImplementedError

    def setup_environment(self) -> None:
        keep_from_forked_processes()
        if not self._threads_were_chosen:
            cpu_threads.use_one(self.root_device)
        if self.root_device.type == "cuda" and self._declares_tables():  # Without tables, nobody watches the ranks.
            leave_failures_to_us(self._wait.total_seconds())
        try:
            await_store(self.cluster_environment, self._wait)
            super().setup_environment()
        except (RuntimeError, ConnectionError) as error:
            if not is_connection_error(error):
                raise
            raise missing_at_start(error, self.cluster_environment, self._wait) from error

    def setup_distributed(self) -> None:
        # gloo and NCCL connect the ranks here, and both may wait without end for a rank that dies meanwhile.
        bounded_connect(super().setup_distributed, self._wait, self.root_device)


def missing_at_start(error: Exception, environment: Any, timeout: timedelta) -> FreeScaleError:
    """The error to raise if the default process group could not be set up. ``environment`` is Lightning's."""
    if dist.is_initialized():
        return Control(timeout).missing_ranks("the set-up of the process group", error)
    return FreeScaleError(describe_missing_ranks(error, environment.global_rank(), environment.world_size(), timeout))
