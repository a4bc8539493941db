"""Runs what tests on a GPU start in other processes, several at a time: most of their time the ranks import and compile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.tmpdir import tmppath_result_key

from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.gpu_cluster.mps import MPS_CONTROL, mps
from benchmarks.harness.gpu_cluster.rank_process import ClusterFailed

HERE = Path(__file__).resolve().parent
# Each rank has SMs of its own: with two scripts of four ranks 16 of an H200. They suffice for all kernels of NCCL that a rank
# runs at a time, and for a kernel beside them. Ranks that share SMs can wait for one another without end, see CONTRIBUTING.md.
SCRIPTS_AT_ONCE = 2
CALLS_AT_ONCE = max(2, (os.cpu_count() or 1) // 5)
ALL_SMS = (0, 1)

TIMEOUT, TIMEOUT_ALONE = 300.0, 150.0  # seconds of a run. Then its ranks print what they wait for, and end.


class Run(NamedTuple):
    """A script that runs on several ranks of one GPU.

    Args:
        script: a file of this folder. Rank 0 prints ``RESULT`` and JSON. The variable ``FOLDER`` names a folder for its files.
        arguments: command line arguments.
        ranks: number of ranks.
        alone: the ranks have all SMs of the GPU, and no other script runs at the same time.
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


def name_of(one: Run | Call) -> str:
    what = one.script.removesuffix(".py") if isinstance(one, Run) else one.function.__name__
    return "-".join((what, *map(str, one.arguments)))


def started_early(*each: Run | Call) -> Callable[[Callable], Callable]:
    """The test is called once for each run or call. These start before the first test, and the test gets the result."""
    values = [pytest.param(one, marks=[pytest.mark.alone] if one.alone else [], id=name_of(one)) for one in each]
    return pytest.mark.parametrize("results", values, indirect=True)


def result_of(
    run: Run | Call, folder: Path, variables: Mapping[str, str] | None = None, sms: tuple[int, int] = ALL_SMS
) -> Any:
    """Run the script, and return what rank 0 prints; or call the function.

    Args:
        folder: for the files of a run.
        variables: further variables of the environment of its ranks.
        sms: which part of the GPU's SMs the ranks get, and how many parts there are.
    """
    if isinstance(run, Call):
        return run.function(*run.arguments)
    argv = [str(HERE / run.script), *run.arguments]
    env = {"FOLDER": str(folder)} | dict(variables or {})
    try:
        timeout = TIMEOUT_ALONE if run.alone else TIMEOUT
        outputs = launcher.run(run.ranks, argv, timeout=timeout, sms=sms, env=env)
    except ClusterFailed as failure:  # It cannot be sent to another process.
        raise AssertionError(str(failure)) from None
    return json.loads(next(line for line in outputs[0].splitlines() if line.startswith("RESULT "))[len("RESULT ") :])


class Timed(NamedTuple):
    """A result, and when it was computed: seconds of the monotonic clock, which all processes share."""

    result: Any
    begin: float
    end: float


_sms = ALL_SMS  # of the scripts that this process runs


def take_sms(parts: Any) -> None:
    """Let this process run its scripts on one of ``parts``, a queue."""
    global _sms
    _sms = parts.get()


def timed(run: Run | Call, folder: Path, variables: Mapping[str, str]) -> Timed:
    begin = time.monotonic()
    result = result_of(run, folder, variables, _sms)
    return Timed(result, begin, time.monotonic())


@contextmanager
def one_daemon() -> Iterator[dict[str, str]]:
    """An MPS daemon for all runs. Processes of several daemons would use the GPU in turns.

    Yields:
        The variables that name it. They are empty if MPS is not installed.
    """
    if shutil.which(MPS_CONTROL) is None:
        yield {}
        return
    with mps(100) as variables:
        yield {name: value for name, value in variables.items() if name.endswith("DIRECTORY")}


def runs_of(items: Iterable[Any]) -> list[Run | Call]:
    """The runs and calls of the selected tests, in their order."""
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return [values["results"] for values in parameters if isinstance(values.get("results"), Run | Call)]


def turn(item: Any) -> int:
    """When a test runs: first those that wait for no run or call, then those that do, then those that need the whole GPU."""
    return 2 if "alone" in item.keywords else len(runs_of([item]))


class Clusters:
    """Starts all ``runs`` except those that run alone: ``SCRIPTS_AT_ONCE`` scripts and ``CALLS_AT_ONCE`` calls at a time.

    Args:
        runs: the runs and calls of the tests that were selected, in the order of the tests.
        folder: for their files.
        variables: further variables of the environment of the ranks.
    """

    def __init__(self, runs: Iterable[Run | Call], folder: Path, variables: Mapping[str, str] | None = None):
        self._folder, self._begin = folder, time.monotonic()
        self._alone: dict[Run | Call, Timed | None] = {}  # None for one that has not ended
        # Processes, because every test changes the environment and the current folder of this one.
        context = get_context("fork")
        parts = context.SimpleQueue()
        for number in range(SCRIPTS_AT_ONCE):
            parts.put((number, SCRIPTS_AT_ONCE))
        self._scripts = ProcessPoolExecutor(SCRIPTS_AT_ONCE, context, take_sms, (parts,))
        self._calls = ProcessPoolExecutor(CALLS_AT_ONCE, context)
        self._started: dict[Run | Call, Future] = {}
        for run in runs:
            if not run.alone and run not in self._started:
                pool = self._scripts if isinstance(run, Run) else self._calls
                self._started[run] = pool.submit(timed, run, self._new_folder(), variables or {})

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder))

    def result(self, run: Run | Call) -> Any:
        """The result of a run or call. One that runs alone begins when all others have ended."""
        if run.alone:
            wait(self._started.values())
            self._alone[run] = None
            self._alone[run] = one = timed(run, self._new_folder(), {})
            return one.result
        return self._started[run].result().result

    def describe(self) -> list[str]:
        """When each run and call began and ended, in seconds since the first one began; those that failed or have not ended."""
        ended = {run: future.result() for run, future in self._started.items() if _has_succeeded(future)}
        ended |= {run: one for run, one in self._alone.items() if one is not None}
        failed = [run for run, future in self._started.items() if future.done() and run not in ended]
        begun = [run for run, future in self._started.items() if not future.done()]
        begun += [run for run, one in self._alone.items() if one is None]
        return [
            *(
                f"{one.begin - self._begin:.0f} to {one.end - self._begin:.0f} s: {name_of(run)}"
                for run, one in sorted(ended.items(), key=lambda entry: entry[1].end)
            ),
            *(f"failed: {name_of(run)}" for run in failed),
            *(f"not ended after {time.monotonic() - self._begin:.0f} s: {name_of(run)}" for run in begun),
        ]

    def close(self) -> None:
        """Start nothing more, and end what still runs."""
        is_idle = all(future.done() for future in self._started.values())
        for pool in (self._scripts, self._calls):
            pool.shutdown(wait=is_idle, cancel_futures=True)
        if is_idle:  # The processes have ended. SIGTERM would make each of them print a traceback.
            return
        for process in active_children():
            process.terminate()  # It ends its ranks, see :func:`interrupt_on_sigterm`.
        for process in active_children():
            process.join()


def interrupt_on_sigterm() -> None:
    """Make SIGTERM end this process like Ctrl-C. Processes that are forked from it later do the same.

    Otherwise a session that is ended by a time limit would say neither what has passed nor what was running, and its ranks
    would stay on the GPU.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def may_be_interrupted(item: pytest.Item) -> None:
    """Call it before a long wait in the set-up of a test: Ctrl-C then ends the session with its summary.

    Without it, pytest ends with a KeyError instead: it asks for the result of the set-up, which has none, to decide whether it
    removes the folder ``tmp_path``.
    """
    item.stash.setdefault(tmppath_result_key, {})


def _has_succeeded(future: Future) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
