"""Runs a benchmark's command in forked processes: the same entry points and options, without starting new interpreters."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.gpu_cluster.rank_process import RankProcess

ROOT = Path(__file__).resolve().parents[2]
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


class Printed(NamedTuple):
    json: dict[str, Any]
    errors: str


class ForkedProcess:
    """A forked process with the interface of ``subprocess.Popen`` that the launcher uses.

    Args:
        target: what the process runs.
        env: its environment.
        files: where its stdout and stderr go; ``None`` leaves one as it is.
    """

    def __init__(self, target: Callable[[], None], env: Mapping[str, str], files: Sequence[Path | None]):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_run(target, env, files))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return status


def _run(target: Callable[[], None], env: Mapping[str, str], files: Sequence[Path | None]) -> int:
    """Run ``target`` in the forked child; returns its exit status."""
    try:
        os.setsid()
        for number, path in enumerate(files, start=1):
            if path is not None:
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        # pytest replaces these objects; the child writes to the real file descriptors.
        sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
        os.environ.clear()
        os.environ.update(env)
        torch.set_num_threads(1)
        torch.backends.mkldnn.set_flags(False)  # oneDNN's state does not survive a fork: matrix products hang on ARM
        target()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


class ForkedRank(RankProcess):
    """A rank that is forked from the launcher. Rank 0's stdout and every rank's stderr are the launcher's."""

    def __init__(self, rank: int, argv: Sequence[str], env: Mapping[str, str], echo: bool):
        assert echo
        assert argv[0] == "-m"
        self.rank = rank

        def run() -> None:
            sys.argv = [argv[1], *argv[2:]]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)

        self.process: Any = ForkedProcess(run, env, [Path(os.devnull) if rank else None, None])

    def output(self) -> str:
        return "(its output is on stderr)"


def fork_script(name: str, arguments: Sequence[str], files: Sequence[Path]) -> ForkedProcess:
    """Run ``benchmarks/name.py`` as a file. Its ranks are forked, too."""
    path = str(ROOT / "benchmarks" / f"{name}.py")

    def run() -> None:
        launcher.RankProcess = ForkedRank  # type: ignore[misc]
        sys.argv = [path, *arguments]
        runpy.run_path(path, run_name="__main__")

    env = {key: value for key, value in os.environ.items() if key not in OF_LAUNCHERS}
    return ForkedProcess(run, env, files)


def run_benchmark(name: str, folder: Path, *arguments: str, timeout: float = 300) -> Printed:
    """What ``benchmarks/name.py`` prints as JSON, and its stderr; it must succeed.

    Args:
        folder: for the files that hold stdout and stderr.
        timeout: seconds.
    """
    files = folder / "stdout", folder / "stderr"
    process = fork_script(name, [*arguments, "--json"], files)
    try:
        process.wait(timeout)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, 9)
    output, errors = (path.read_text() for path in files)
    assert process.returncode == 0, errors
    return Printed(json.loads(output), errors)


def start_interpreter(name: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run ``benchmarks/name.py`` in a new interpreter, as a user does; needed on a GPU, which a forked process cannot use."""
    env = {key: value for key, value in os.environ.items() if key not in OF_LAUNCHERS}
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
