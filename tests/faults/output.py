"""What the ranks print: one file for each rank of an attempt, with the positions of its threads if it is late."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.ranks import run_rank

LINES, LINE_CHARACTERS = 120, 300  # of a rank, that are shown after a problem
SHORT_LINES, SHORT_CHARACTERS = 3, 200  # of a rank, that are stored after a problem
FRAMES = 8  # of a thread, the innermost ones
EXPLANATION = re.compile(r"rank \d+(: | reports: | has died)")
NOISE = re.compile(
    r"frame #\d+:|#\d+ \w|<omitting python|Exception raised from|.*Warning: |.*DTensor|.*(TCPStore|socket)\.cpp:|\s*$|-+$|.*Tip: "
    r"|[GT]PU available|LOCAL_RANK|distributed_backend|Initializing dist|All distributed|You are using a CUDA|.*run_backward\("
    r"|  pg, pg_store|  device(_type)? = |  and md|.*fbgemm_torch_compat|.*cannot determine compat|\W*\[(0|33)m|WARNING:root"
)


def output_of(folder: Path, attempt: int, rank: int) -> Path:
    """The file to which a rank prints."""
    return folder / "output" / f"{attempt}.{rank}.txt"


def run_rank_with_output(path: Path, *arguments: Any) -> None:
    """The life of the process of one rank, which prints to a file. SIGUSR1 adds the positions of its threads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    run_rank(*arguments)


def ask_for_positions(processes: Iterable[Any]) -> None:
    """Let the processes print where their threads are. It needs no Python code of theirs."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)


def death(path: Path, rank: int, exit_code: int | None) -> str:
    """What is known about a process that has sent no error. One that has ended itself has printed why."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    own = [number for number, line in enumerate(lines) if line.startswith(f"rank {rank}: ")]
    if exit_code == 1 and own:
        words = " | ".join(line for line in lines[own[-1] :] if EXPLANATION.match(line))
        return f"the process has ended itself with exit code 1: {words}"
    return f"the process has died with exit code {exit_code} without a message"


def last_lines(path: Path, count: int = LINES) -> list[str]:
    """The last lines of what a rank has printed, without what every training prints, and the innermost frames of threads."""
    kept, frames = [], 0
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        frames = frames + 1 if line.startswith("  File ") else 0
        if frames <= FRAMES and not NOISE.match(line):
            kept.append(line[:LINE_CHARACTERS])
    return kept[-count:]


def describe(folder: Path, attempt: int, world: int, errors: dict[int, str]) -> list[str]:
    """The ends of the outputs and the errors of all ranks of an attempt. Each line says whose it is."""
    lines = []
    for rank in range(world):
        own = [*last_lines(output_of(folder, attempt, rank)), *errors.get(rank, "").splitlines()[-LINES:]]
        lines += [f"{folder.name}/{attempt}/rank {rank}| {line}" for line in own]
    return lines


def shorten(lines: Sequence[str]) -> list[str]:
    """The last lines of each rank, for a file of results."""
    ranks: dict[str, list[str]] = {}
    for line in lines:
        ranks.setdefault(line.partition("|")[0], []).append(line[:SHORT_CHARACTERS])
    return [line for own in ranks.values() for line in own[-SHORT_LINES:]]
