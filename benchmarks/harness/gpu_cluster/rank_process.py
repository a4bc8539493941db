"""One rank as a process, and the rules for a group of them: the first failure or the timeout ends all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

GRACE = 5.0  # seconds between SIGTERM and SIGKILL
STACKS = "PYTHONFAULTHANDLER"  # environment variable: SIGABRT makes Python print the stacks of all threads
EXIT_OF_TIMEOUT = 124
MOST_OUTPUT = 10_000  # characters of the output of a rank in the message after a timeout


class ClusterFailed(RuntimeError):
    """A rank failed, or the ranks did not finish in time.

    Attributes:
        status: exit status for the launcher: that of the first rank that failed, 1 if a signal ended it, 124 for a timeout.
    """

    def __init__(self, message: str, status: int):
        self.status = status if status > 0 else 1
        super().__init__(message)


class RankProcess:
    """One rank. It runs in its own session, so that it ends together with every process that it started.

    Args:
        rank: number of the rank.
        argv: arguments of the Python interpreter.
        env: environment of the process.
        echo: print rank 0's stdout and every rank's stderr while the rank runs.
    """

    def __init__(self, rank: int, argv: Sequence[str], env: Mapping[str, str], echo: bool):
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, *argv],
            env={STACKS: "1"} | dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: list[str] = []
        out, err = self.process.stdout, self.process.stderr
        assert out is not None
        assert err is not None
        sinks = (out, sys.stdout if echo and rank == 0 else None), (err, sys.stderr if echo else None)
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in sinks]
        for reader in self._readers:
            reader.start()

    def _read(self, source: IO[str], sink: IO[str] | None) -> None:
        for line in source:
            self._lines.append(line)
            if sink is not None:
                print(line, end="", file=sink, flush=True)

    def output(self) -> str:
        """Stdout and stderr so far, in the order in which the lines arrived."""
        for reader in self._readers:
            reader.join(timeout=GRACE)  # limited: a child of the rank may keep the pipe open
        return "".join(self._lines)

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the rank and everything in its session."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def wait_for_all(ranks: list[RankProcess], timeout: float) -> None:
    """Wait until every rank has ended.

    Raises:
        ClusterFailed: a rank failed, or ``timeout`` seconds passed. All ranks have been ended. After a timeout, the message has
            the Python stacks of those that were still running.
    """
    deadline = time.monotonic() + timeout
    while None in [rank.process.poll() for rank in ranks]:
        _raise_failure(ranks)
        if time.monotonic() > deadline:
            running = [rank for rank in ranks if rank.process.returncode is None]
            print_stacks(running)
            end_all(ranks)
            tails = "\n".join(f"rank {rank.rank}: ...{rank.output()[-MOST_OUTPUT:]}" for rank in running)
            numbers = [rank.rank for rank in running]
            raise ClusterFailed(f"timeout after {timeout:g} s; still running: {numbers}\n{tails}", EXIT_OF_TIMEOUT)
        time.sleep(0.02)
    _raise_failure(ranks)


def _raise_failure(ranks: list[RankProcess]) -> None:
    for rank in ranks:
        status = rank.process.returncode
        if not status:
            continue
        if status != EXIT_OF_TIMEOUT:
            end_all(ranks)
            raise ClusterFailed(f"rank {rank.rank} ended with status {status}:\n{rank.output()}", status)
        await_all(ranks)  # The others wait for the same transfer, or for this rank. They are about to say so.
        end_all(ranks)
        tails = "\n".join(f"rank {one.rank}: ...{one.output()[-MOST_OUTPUT:]}" for one in ranks)
        raise ClusterFailed(f"rank {rank.rank} made no progress\n{tails}", status)


def await_all(ranks: list[RankProcess]) -> None:
    """Wait until all have ended, or until the grace period is over."""
    deadline = time.monotonic() + GRACE
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))


def print_stacks(ranks: list[RankProcess]) -> None:
    """Make these ranks print the stacks of their threads, and end. It shows what they wait for."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            rank.process.send_signal(signal.SIGABRT)
    await_all(ranks)


def end_all(ranks: list[RankProcess]) -> None:
    """End the ranks that still run, and every process that the ranks started."""
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        rank.send_signal(signal.SIGKILL)
        rank.process.wait()
