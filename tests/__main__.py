"""Run all tests, several parts at the same time: ``python -m tests [pytest options]``.

A part is a test file, a folder, or some files of a large folder. Most tests wait for other processes now and then, so a few
more parts than there are cores finish sooner. Each part runs in a process that is forked from this one, which has imported
torch, Lightning and TorchRec already: importing them takes as long as many tests do.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import lightning_freescale  # noqa: F401 - the import that all parts share

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 2 if torch.version.cuda else min(1 + (os.cpu_count() or 1), 4)  # parts; two share a GPU
FILES_OF_A_PART = 8
# These take longest, so they start first. The last parts should be short: then no core waits at the end.
FIRST = (
    "tests/test_packaging.py",
    "tests/examples",
    "tests/transport",
    "tests/faults",
    "tests/strategy",
    "tests/contract",
    "tests/embedding",
    "tests/balance",
    "tests/models/hopper",
    "tests",
)


def parts() -> list[list[str]]:
    """The paths of each part, in the order in which the parts start."""
    by_folder: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        folder = name if name in FIRST else str(path.parent.relative_to(ROOT))
        by_folder.setdefault(folder, []).append(name)
    order = sorted(by_folder, key=lambda folder: FIRST.index(folder) if folder in FIRST else len(FIRST))
    return [
        by_folder[folder][start : start + FILES_OF_A_PART]
        for folder in order
        for start in range(0, len(by_folder[folder]), FILES_OF_A_PART)
    ]


def start(arguments: Sequence[str], log: Path) -> int:
    """Run pytest in a forked process, which writes to ``log``. Returns the process id. The exit code is that of pytest."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    status = 3  # an internal error, as pytest says it
    try:
        atexit._clear()  # what the parent does at its end
        with log.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        if torch.version.cuda:  # a forked process cannot use a GPU if the first one has asked for it
            os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
        sys.argv = ["pytest", *arguments]
        status = int(pytest.main(list(arguments)))
        atexit._run_exitfuncs()  # pytest removes old folders of tests
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def describe(part: Sequence[str], status: int, log: Path, cpu_seconds: float) -> str:
    """One line for a part that has passed, the whole output of one that has not."""
    text = log.read_text(errors="replace")
    summary = next((line for line in reversed(text.splitlines()) if re.search(r" in \d+\.\d+s", line)), "no summary")
    line = f"{part[0]}{f' to {Path(part[-1]).name}' if len(part) > 1 else ''}: {summary.strip('= ')}"
    line += f", {cpu_seconds:.0f} s of CPU time"
    return line if status in (0, 5) else f"{text}\n{line} (exit code {status})"


def main() -> int:
    os.chdir(ROOT)
    gc.freeze()  # no part changes pages of memory only to look for garbage in what was imported
    options = ["-q", "-p", "no:cacheprovider", *sys.argv[1:]]
    waiting, statuses = parts(), set()
    running: dict[int, tuple[list[str], Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < AT_ONCE:
                    log = Path(folder) / f"{len(waiting)}.log"
                    part = waiting.pop(0)
                    running[start([*options, *part], log)] = (part, log)
                process, ended, used = os.wait3(0)
                part, log = running.pop(process)
                status = os.waitstatus_to_exitcode(ended)
                statuses.add(abs(status))
                print(describe(part, status, log, used.ru_utime + used.ru_stime), flush=True)
        finally:
            for process in running:
                os.kill(process, signal.SIGKILL)
    return max(statuses - {0, 5}, default=0)  # 5: the options select no test of a part


if __name__ == "__main__":
    sys.exit(main())
