"""A strategy that keeps what the exchange of a training was like, and checks of fewer steps, for tests."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embedding import call_agreement, prioritized, table_watch
from lightning_freescale.strategy import pipeline

CHECKED_STEPS = 4


def check_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checks that only the first steps have end after ``CHECKED_STEPS``, so that later steps come early in a test."""
    monkeypatch.setattr(table_watch, "CHECKED_STEPS", CHECKED_STEPS)
    monkeypatch.setattr(prioritized, "SUMMED_BATCHES", CHECKED_STEPS)
    for module in (call_agreement, pipeline):
        monkeypatch.setattr(module, "AGREED_STEPS", CHECKED_STEPS)


class Noting(FreeScaleStrategy):
    """Keeps on the model why its collections are synchronous, and in how many backwards the first one was prioritized."""

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        if self.schedule is not None:
            module.reasons = {part.synchronous_reason for part in self.schedule.modules}
            module.prioritized += self.schedule.modules[0].current is not None
        return super().backward(*args, **kwargs)
