"""Runs what tests on a GPU start in other processes, several at a time: most of their time the ranks import and compile."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.gpu_cluster.rank_process import ClusterFailed

HERE = Path(__file__).resolve().parent
AT_ONCE = max(2, (os.cpu_count() or 1) // 3)  # Most have four ranks, which do not need a core all the time.


class Run(NamedTuple):
    """A script that runs on several ranks of one GPU.

    Args:
        script: a file of this folder. Rank 0 prints ``RESULT`` and JSON. The variable ``FOLDER`` names a folder for its files.
        arguments: command line arguments.
        ranks: number of ranks.
        alone: the ranks have SMs of their own, and no other script runs at the same time.
    """

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int = 4
    alone: bool = False


class Call(NamedTuple):
    """A function that starts processes and returns when they have ended. It is called in a process that does not use CUDA.

    Args:
        function: can be sent to another process, and so can its result.
        arguments: of the function.
        alone: no script and no other call runs at the same time.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    alone: bool = False


def started_early(*each: Run | Call) -> Callable[[Callable], Callable]:
    """The test is called once for each run or call. These start before the first test, and the test gets the result."""

    def name(one: Run | Call) -> str:
        what = one.script.removesuffix(".py") if isinstance(one, Run) else one.function.__name__
        return "-".join((what, *map(str, one.arguments)))

    values = [pytest.param(one, marks=[pytest.mark.alone] if one.alone else [], id=name(one)) for one in each]
    return pytest.mark.parametrize("results", values, indirect=True)


def result_of(run: Run | Call, folder: Path) -> Any:
    """Run the script, and return what rank 0 prints; or call the function."""
    if isinstance(run, Call):
        return run.function(*run.arguments)
    argv = [str(HERE / run.script), *run.arguments]
    try:
        outputs = launcher.run(run.ranks, argv, timeout=300, reserve_sms=run.alone, env={"FOLDER": str(folder)})
    except ClusterFailed as failure:  # It cannot be sent to another process.
        raise AssertionError(str(failure)) from None
    return json.loads(next(line for line in outputs[0].splitlines() if line.startswith("RESULT "))[len("RESULT ") :])


def runs_of(items: Iterable[Any]) -> list[Run | Call]:
    """The runs and calls of the selected tests, in their order."""
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return [values["results"] for values in parameters if isinstance(values.get("results"), Run | Call)]


def turn(item: Any) -> int:
    """When a test runs: first those that wait for no run or call, then those that do, then those that need the whole GPU."""
    return 2 if "alone" in item.keywords else len(runs_of([item]))


class Clusters:
    """Starts all ``runs`` except those that run alone, ``AT_ONCE`` at a time.

    Args:
        runs: the runs and calls of the tests that were selected, in the order of the tests.
        folder: for their files.
    """

    def __init__(self, runs: Iterable[Run | Call], folder: Path):
        self._folder = folder
        # Processes, because every test changes the environment and the current folder of this one.
        self._pool = ProcessPoolExecutor(AT_ONCE, get_context("fork"))
        self._started: dict[Run | Call, Future] = {}
        for run in runs:
            if not run.alone and run not in self._started:
                self._started[run] = self._pool.submit(result_of, run, self._new_folder())

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder))

    def result(self, run: Run | Call) -> Any:
        """The result of a run or call. One that runs alone begins when all others have ended."""
        if run.alone:
            wait(self._started.values())
            return result_of(run, self._new_folder())
        return self._started[run].result()

    def close(self) -> None:
        """Do not start what has not been started."""
        self._pool.shutdown(cancel_futures=True)
