"""Runs tests of one pytest session in several processes at the same time, and reports their results in the session.

A test of a kernel mostly waits until the kernel is compiled, which takes one core. So the files with such tests are divided
among a few processes. Each of them is a pytest session of its own that writes its reports to a file. :class:`Workers` logs them
in the first session, in the order of the tests there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pytest

PROCESSES = 5
EXIT_SECONDS = 60.0  # for the end of a process after its last test
FEWEST = 60  # With fewer tests than this, the start of further processes takes longer than the tests.
_VARIABLE = "FREESCALE_TEST_REPORTS"  # in a worker: the file for its reports


class Worker(NamedTuple):
    """A pytest session in another process."""

    process: subprocess.Popen
    reports: TextIO
    log: Path

    def tail(self) -> str:
        """The end of what it has printed."""
        return self.log.read_text()[-5000:]


def divide(weights: dict[str, int], parts: int) -> list[list[str]]:
    """Divide names into at most ``parts`` lists of similar weight.

    >>> divide({"a": 9, "b": 4, "c": 4, "d": 2}, 2)
    [['a'], ['b', 'c', 'd']]
    """
    divided: list[list[str]] = [[] for _ in range(min(parts, len(weights)))]
    loads = [0] * len(divided)
    for name in sorted(weights, key=lambda name: -weights[name]):
        lightest = loads.index(min(loads))
        divided[lightest].append(name)
        loads[lightest] += weights[name]
    return divided


def part_of(path: Path, tests: Path) -> str:
    """What stays in one process: a file, or a folder inside a folder of ``tests``, whose files use the same kernels."""
    folders = path.relative_to(tests).parts[:-1]
    return str(path if len(folders) < 2 else path.parent)


class Workers:
    """Runs tests in other processes.

    Args:
        items: tests of this session. The processes start at once.
        config: of this session.
        folder: for their files.
        processes: number of processes at most.
    """

    def __init__(self, items: Iterable[pytest.Item], config: pytest.Config, folder: Path, processes: int = PROCESSES):
        self._config = config
        parts: dict[str, list[str]] = {}
        for item in items:
            # The limit of a test holds in the worker. Here the test also waits for those before it.
            item.add_marker(pytest.mark.timeout(0), append=False)
            parts.setdefault(part_of(item.path, config.rootpath / "tests"), []).append(item.nodeid)
        self._workers: list[Worker] = []
        self._of: dict[str, Worker] = {}  # by test
        self._arrived: dict[str, list[Any]] = {}  # reports by test
        for names in divide({name: len(tests) for name, tests in parts.items()}, processes):
            tests = [test for name in names for test in parts[name]]
            worker = self._start(tests, folder / str(len(self._workers)))
            self._workers.append(worker)
            self._of |= dict.fromkeys(tests, worker)

    def _start(self, tests: Sequence[str], folder: Path) -> Worker:
        folder.mkdir()
        names, reports, log = folder / "tests", folder / "reports", folder / "log"
        names.write_text("\n".join(tests))
        reports.touch()
        # A test that waits for the GPU inside a call is not reached by a signal. A thread prints the stacks and ends the process.
        options = ["-q", "-p", "no:cacheprovider", "-o", "timeout_method=thread", f"--basetemp={folder / 'temporary'}"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, f"@{names}"],
                cwd=self._config.rootpath,
                env=os.environ | {_VARIABLE: str(reports)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return Worker(process, reports.open(), log)

    def run(self, item: pytest.Item) -> bool:
        """Log the reports of a test. Returns False if the test is to run in this process."""
        worker = self._of.get(item.nodeid)
        if worker is None:
            return False
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, worker):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _reports(self, item: pytest.Item, worker: Worker) -> list[Any]:
        """Wait for the reports of a test. The last one is that of its tear-down."""
        while True:
            ended = worker.process.poll() is not None  # before the look, so that it sees all that was written
            self._read(worker)
            found = self._arrived.get(item.nodeid, [])
            if found and found[-1].when == "teardown":
                return found
            if ended:
                why = f"the process of this test has ended: {worker.process.returncode}\n{worker.tail()}"
                return [pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")]
            time.sleep(0.05)

    def _read(self, worker: Worker) -> None:
        while True:
            start = worker.reports.tell()
            line = worker.reports.readline()
            if not line.endswith("\n"):  # not written to its end
                worker.reports.seek(start)
                return
            data = json.loads(line)
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
            if isinstance(report.longrepr, list):  # of a test that was skipped; JSON has no tuples
                report.longrepr = tuple(report.longrepr)
            self._arrived.setdefault(report.nodeid, []).append(report)

    def wait(self) -> None:
        """Wait until all processes have ended, so that nothing of theirs is left on the GPU. All tests have been reported."""
        for worker in self._workers:
            try:
                worker.process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                warnings.warn(pytest.PytestWarning(f"a worker had to be killed:\n{worker.tail()}"), stacklevel=2)
                worker.process.kill()
                worker.process.wait()

    def close(self) -> None:
        """End what still runs."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.wait()
            worker.reports.close()


class Reporter:
    """In a worker: writes each report to the file that the first session reads."""

    def __init__(self, path: Path):
        self._file = path.open("a")
        self._config: pytest.Config | None = None

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert self._config is not None
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._file.write(json.dumps(data) + "\n")
        self._file.flush()


def register_reporter(config: pytest.Config) -> bool:
    """Returns whether this session is a worker. If it is one, it will write its reports."""
    path = os.environ.pop(_VARIABLE, None)  # sessions that a test starts are no workers
    if path is not None:
        config.pluginmanager.register(Reporter(Path(path)))
    return path is not None
