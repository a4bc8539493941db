"""Fixtures shared by all tests. Heavy imports happen here, once, before any rank is forked."""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from lightning.fabric.utilities import registry

import lightning_freescale  # noqa: F401 - registers the strategies
from tests.gpu.clusters import Clusters, one_daemon, runs_of, turn
from tests.gpu.sleeping_waits import sleep_in_waits
from tests.gpu.workers import FEWEST, Workers, register_reporter

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
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
_IS_WORKER = pytest.StashKey[bool]()
_RUNS = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_IS_WORKER] = register_reporter(config)
    if config.stash[_IS_WORKER]:
        sleep_in_waits()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the tests on a GPU that wait for no run and no call, in other processes."""
    config = session.config
    if config.stash[_IS_WORKER] or config.option.collectonly or not torch.cuda.is_available():
        return
    simple = [item for item in session.items if "gpu" in item.keywords and turn(item) == 0]
    if len(simple) >= FEWEST:
        folder = Path(tempfile.mkdtemp(prefix="workers"))
        config.stash[_WORKERS] = Workers(simple, config, folder)
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(config.stash[_WORKERS].close)  # cleanups run in the reverse order


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    workers = item.config.stash.get(_WORKERS, None)
    if workers is None:
        return None
    if "alone" in item.keywords:
        workers.wait()
    return workers.run(item) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        items.sort(key=turn)
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def clusters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters | None]:
    """Runs and calls of tests on a GPU. They start before the first test, and other tests run beside them."""
    runs = runs_of(request.session.items)
    if not runs or not torch.cuda.is_available():
        yield None
        return
    with one_daemon() as variables:
        started = Clusters(runs, tmp_path_factory.mktemp("clusters"), variables)
        yield started
        request.config.stash[_RUNS] = started.describe()
        started.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_RUNS, []):
        terminalreporter.write_line(line)


@pytest.fixture
def results(request: pytest.FixtureRequest, clusters: Clusters) -> Any:
    """The result of the run or call of a test with ``started_early``."""
    return clusters.result(request.param)


@pytest.fixture
def movielens() -> Path:
    path = SHARED_DATA / "ml-latest-small.ratings.csv"
    if not path.exists():
        pytest.skip(f"{path.name} is not part of the package")
    return path
