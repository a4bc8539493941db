"""The end of a training that has failed: the error names the rank whose failure explains it, and nothing hides that error.

When a rank dies, the others may get errors of CUDA. The kernels of NCCL that wait for the rank are aborted. What runs behind them
may use memory that is free already, or takes ids and sizes from buffers that nothing was written to. An MPS server that fails
gives an error to each of its clients. Such an error does not say why. Every later call of CUDA repeats it, also those of
callbacks that handle the exception, and those with which the Trainer moves logged values to the CPU at its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_freescale.runtime import last_resort
from lightning_freescale.runtime import lightning_compat as compat
from lightning_freescale.runtime.device_errors import is_device_error, is_nccl_error, tells_of_device_error
from lightning_freescale.runtime.errors import FreeScaleError
from lightning_freescale.runtime.log import logger
from lightning_freescale.runtime.process_groups import is_connection_error
from lightning_freescale.strategy.failure_watch import LATE_EXIT_FACTOR, LEAST_EXIT_SECONDS

if TYPE_CHECKING:  # The mixin completes the DDPStrategy of either Lightning namespace.
    from lightning.pytorch.strategies import DDPStrategy as _Base

    from lightning_freescale.strategy.control import Control
else:
    _Base = object

CAUSE_SECONDS = (
    5.0  # How long an error of CUDA or NCCL waits for the news that a rank has failed. It takes about a second.
)
REPORT = " ended with "  # stands between a rank and its error in the report of another rank
_RANK = re.compile(r"\brank (\d+)\b")
_SEVERAL = (
    "More than one rank has an error of CUDA. If they share a device or an MPS server, that has failed. Otherwise the cause is "
    "the same on each of them, such as a kernel."
)


def named(control: Control, error: Exception) -> Exception:
    """The error to raise instead of ``error``: if it is one of CUDA or NCCL and a rank has failed, one that names the rank.

    An error of this package stays what it is. If it reports an error of CUDA or NCCL, of a save in the background for example, or
    if a rank is missing, it gets a note, unless it names the rank itself. Other errors get a note when they are reported.
    """
    follows = is_device_error(error) or is_nccl_error(error)
    if not follows and not (isinstance(error, FreeScaleError) and control.misses_a_rank):
        return error
    explanation = control.explanation(CAUSE_SECONDS if follows else 0.0)
    if explanation is None:
        return error
    reason = f"This follows a failure: {explanation}"
    reason = f"{reason}. {_SEVERAL}" if tells_of_device_error(explanation) else reason
    if not isinstance(error, FreeScaleError):
        return FreeScaleError(f"rank {control.rank}: {_first_line(error)}. {reason}")
    own = {str(control.rank)}
    if set(_RANK.findall(explanation)) - own - set(_RANK.findall(str(error))):
        error.add_note(f"rank {control.rank}: {reason}")
    return error


def note_on(reports: str, error: BaseException) -> str:
    """What a note says about the reports of the other ranks: they, and whether all ranks have an error of CUDA."""
    found = [report.partition(REPORT)[2] for report in reports.split("; ")]
    return f"{reports}. {_SEVERAL}" if is_device_error(error) and all(map(tells_of_device_error, found)) else reports


def call_all(actions: Iterable[Callable[[], Any]], after_failure: bool) -> None:
    """Call all ``actions``. After a failure of the training, their errors are logged, because they would hide it."""
    for action in actions:
        try:
            action()
        except Exception as error:
            if not after_failure:
                raise
            logger.warning("after the failure of the training: %s", _first_line(error))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]


class NamedFailures(_Base):
    """Lightning's hooks that handle an exception, as a part of the strategy class."""

    control: Control | None
    _module: Any
    _failed = False  # Whether an exception has ended the run.
    _last_error = ""
    _wait: timedelta  # The strategy's timeout.

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self.launcher is not None:
            compat.replace_errors(self.launcher, self._named)

    def _named(self, trainer: Any, error: BaseException) -> BaseException:
        """The error that the Trainer handles, before its callbacks do. No consequence of a failure hides it from now on."""
        if self.control is None or self.control.world_size == 1:
            return error
        if isinstance(error, Exception):
            error = named(self.control, error)
        if is_device_error(error):
            last_resort.name_crashes(f"rank {self.control.rank}: {_first_line(error)}")
        if trainer is not None:
            compat.log_errors_of_handling(trainer, self._is_consequence)
        return error

    def _is_consequence(self, error: Exception) -> bool:
        """Whether ``error``, which was raised after another one, may follow from the failure of a rank or of the device."""
        misses = self.control is not None and self.control.misses_a_rank
        return misses or is_device_error(error) or is_nccl_error(error) or is_connection_error(error)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._failed, self._last_error = True, _first_line(exception)
        if self.control is None or self.control.world_size == 1:
            return
        reports = self.control.report_exception(exception)
        if reports is not None:
            step, place = self._module.trainer.global_step, f"rank {self.global_rank} of {self.world_size}"
            exception.add_note(f"{place}, step {step}: {note_on(reports, exception)}")
            self._last_error += f" ({reports})"
        self.control.leave_last()

    def end_after_failure(self, parts: Iterable[Callable[[], Any]]) -> None:
        """Call the last parts of the end. After a failure on CUDA they have a limit: they may wait for a kernel without end."""
        limited = self._failed and self.root_device.type == "cuda" and self.world_size > 1
        if limited:
            seconds = max(LATE_EXIT_FACTOR * self._wait.total_seconds(), LEAST_EXIT_SECONDS)
            stuck = f"The end of the training takes longer than {seconds:.0f} s. The process ends itself."
            last_resort.arm(seconds, f"rank {self.global_rank}: {self._last_error}. {stuck}", [])
        call_all(parts, after_failure=self._failed)
        if limited:
            last_resort.disarm()
