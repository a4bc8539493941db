"""A pytest plugin: every Trainer of one CPU process that names no strategy trains with that of ``FREESCALE_SUITE_STRATEGY``."""

from __future__ import annotations

import functools
import os
from typing import Any

import lightning.pytorch.trainer.trainer as trainer_module
import pytest
from lightning.fabric.strategies.launchers import subprocess_script

import lightning_freescale  # noqa: F401 - registers the strategies

STRATEGY = os.environ["FREESCALE_SUITE_STRATEGY"]
OWN_PROCESSES = (
    "spawn",
    "fork",
    "test_fit_test_synchronization",
)  # tests that choose their strategy and start processes
_make_trainer = trainer_module.Trainer.__init__
_make_observer = subprocess_script._ChildProcessObserver.__init__


@functools.wraps(_make_trainer)
def _with_strategy(self: Any, *args: Any, **options: Any) -> None:
    is_plain = (
        options.get("strategy", "auto") in ("auto", None)
        and options.get("accelerator", "auto") in ("auto", "cpu", None)
        and options.get("devices", "auto") in ("auto", None, 1, "1")
        and options.get("num_nodes", 1) == 1
    )
    _make_trainer(
        self, *args, **(options | {"strategy": STRATEGY, "accelerator": "cpu", "devices": 1} if is_plain else options)
    )


def _fast_observer(self: Any, main_pid: int, child_processes: Any, sleep_period: float = 5) -> None:
    """Lightning's conftest joins this thread after every test, and it sleeps for 5 s at a time."""
    _make_observer(self, main_pid, child_processes, sleep_period=0.02)  # type: ignore[arg-type]


trainer_module.Trainer.__init__ = _with_strategy  # type: ignore[method-assign]
subprocess_script._ChildProcessObserver.__init__ = _fast_observer  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not any(name in item.nodeid for name in OWN_PROCESSES)]
