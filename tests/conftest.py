"""Fixtures shared by all tests. Heavy imports happen here, once, before any rank is forked."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from lightning.fabric.utilities import registry

import lightning_freescale  # noqa: F401 - registers the strategies
from tests.gpu.clusters import Clusters, interrupt_on_sigterm, may_be_interrupted, one_daemon, runs_of, turn
from tests.gpu.sleeping_waits import sleep_in_waits
from tests.gpu.workers import FEWEST, Workers, register_reporter

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# torch looks up the name of each address that connects. If the name server loses a question, that takes 5 s, and the rendezvous
# store answers nobody meanwhile. No test needs a name server, except for those that run pip.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
# The same examples in every run: a change is blamed for what it did, not for what chance found that day.
settings.register_profile("repeatable", derandomize=True, deadline=None)  # a loaded machine is no failure
settings.load_profile("repeatable")
# Every Trainer reads the metadata of all installed packages, to find callbacks. The ranks inherit what is read here.
registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[assignment]
registry._load_external_callbacks("lightning.pytorch.callbacks_factory")
gc.freeze()  # later collections skip what was imported
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _quiet_and_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test runs in its own folder, with one thread and the environment it found, and leaves no process group."""
    monkeypatch.chdir(tmp_path)
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    environment = dict(os.environ)
    yield
    if torch.distributed.is_initialized():  # run_ranks could not fork ranks any more
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


_WORKERS = pytest.StashKey[Workers]()
_CLUSTERS = pytest.StashKey[Clusters]()
_IS_WORKER = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_IS_WORKER] = register_reporter(config)
    if config.stash[_IS_WORKER]:
        sleep_in_waits()


def pytest_collection_finish(session: pytest.Session) -> None:
    """On a GPU: start what runs in other processes, before the first test."""
    config = session.config
    if config.stash[_IS_WORKER] or config.option.collectonly or not torch.cuda.is_available():
        return
    interrupt_on_sigterm()
    stack = contextlib.ExitStack()
    config.add_cleanup(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-tests-", ignore_cleanup_errors=True)))
    if runs := runs_of(session.items):
        config.stash[_CLUSTERS] = Clusters(runs, folder, stack.enter_context(one_daemon()))
        stack.callback(config.stash[_CLUSTERS].close)
    simple = [item for item in session.items if "gpu" in item.keywords and turn(item) == 0]
    if len(simple) >= FEWEST:
        config.stash[_WORKERS] = Workers(simple, config, folder)
        stack.callback(config.stash[_WORKERS].close)


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    workers = item.config.stash.get(_WORKERS, None)
    if workers is None:
        return None
    if "alone" in item.keywords:
        workers.wait()
    return workers.run(item) or None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    clusters = config.stash.get(_CLUSTERS, None)
    for line in clusters.describe() if clusters is not None else ():
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        items.sort(key=turn)
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def results(request: pytest.FixtureRequest) -> Any:
    """The result of the run or call of a test with ``started_early``."""
    may_be_interrupted(request.node)
    return request.config.stash[_CLUSTERS].result(request.param)


@pytest.fixture
def movielens() -> Path:
    path = SHARED_DATA / "ml-latest-small.ratings.csv"
    if not path.exists():
        pytest.skip(f"{path.name} is not part of the package")
    return path
