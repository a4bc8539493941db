"""Runs the scripts of the cluster tests, several at a time: most of their time the ranks import, compile and compare."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.gpu_cluster.rank_process import ClusterFailed

HERE = Path(__file__).resolve().parent
AT_ONCE = 3


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


def result_of(run: Run, folder: Path) -> Any:
    """Run the script, and return what rank 0 prints."""
    argv = [str(HERE / run.script), *run.arguments]
    try:
        outputs = launcher.run(run.ranks, argv, timeout=300, reserve_sms=run.alone, env={"FOLDER": str(folder)})
    except ClusterFailed as failure:  # It cannot be sent to another process.
        raise AssertionError(str(failure)) from None
    return json.loads(next(line for line in outputs[0].splitlines() if line.startswith("RESULT "))[len("RESULT ") :])


def runs_of(items: Iterable[Any]) -> list[Run]:
    """The runs of the selected tests, in their order."""
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return [values["results"] for values in parameters if isinstance(values.get("results"), Run)]


def turn(item: Any) -> int:
    """When a test runs: first those without a run, then those that wait for a run, then those that need the whole GPU."""
    return 2 if "alone" in item.keywords else len(runs_of([item]))


class Clusters:
    """Starts all ``runs`` except those that run alone, ``AT_ONCE`` at a time.

    Args:
        runs: the runs of the tests that were selected, in the order of the tests.
        folder: for their files.
    """

    def __init__(self, runs: Iterable[Run], folder: Path):
        self._folder = folder
        # Processes, because every test changes the environment and the current folder of this one.
        self._pool = ProcessPoolExecutor(AT_ONCE, get_context("fork"))
        self._started: dict[Run, Future] = {}
        for run in runs:
            if not run.alone and run not in self._started:
                self._started[run] = self._pool.submit(result_of, run, self._new_folder())

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder))

    def result(self, run: Run) -> Any:
        """The result of a run. One that runs alone begins when all others have ended."""
        if run.alone:
            wait(self._started.values())
            return result_of(run, self._new_folder())
        return self._started[run].result()

    def close(self) -> None:
        """Do not start what has not been started."""
        self._pool.shutdown(cancel_futures=True)
