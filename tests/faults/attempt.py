"""One start of all ranks of a training. A rank fails at a chosen moment, and the others are watched until they end."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from benchmarks.harness.free_ports import free_port
from tests.faults.failures import FAILURES, HITS_ALL_RANKS, Failure
from tests.faults.output import ask_for_positions, death, output_of, run_rank_with_output
from tests.faults.training import Settings, train
from tests.ranks import let_end

POLL_SECONDS = 0.002
END_SECONDS = 5.0  # How long a process may take to end after it has closed its pipe.
LATE = 0.75  # A rank that still runs after this part of the limit prints where its threads are.
PRINT_SECONDS = 1.0  # How long that may take.
START = {"method": "fork"}  # how processes are started; "spawn" is slower, but allows a parent that has used CUDA


@dataclass(frozen=True)
class Moment:
    """When a rank is killed: ``delay`` seconds after it has written ``count`` lines to its record of ``kind``.

    ``kind`` is ``"start"`` (``count`` is 0), or ``"forward"``, ``"backward"``, ``"exchange"`` or ``"saves"``, which say what the
    rank begins when it writes a line. The name of one of :data:`FAILURES` means that the rank fails by itself in that step.
    """

    kind: str
    count: int
    delay: float


@dataclass
class Outcome:
    """How an attempt ended.

    Attributes:
        failed: whether the victim was killed, or has failed, before it was done.
        results: the weights of each rank that has completed the training.
        errors: what each rank that failed has raised; not the victim, unless the failure hits all ranks.
        seconds: how long after the failure each of these ranks ended.
        stuck: the ranks that were still running at the limit.
        message: the error of the victim, if it has raised one.
        start_seconds: how long it took from the start of the processes to the begin of the training; ``None`` if it never began.
    """

    failed: bool = False
    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    stuck: list[int] = field(default_factory=list)
    message: str = ""
    start_seconds: float | None = None


def run_attempt(
    world: int,
    folder: Path,
    attempt: int,
    settings: Settings,
    victim: int | None = None,
    moment: Moment | None = None,
    limit: float = 60.0,
) -> Outcome:
    """Start ``world`` ranks, let ``victim`` fail at ``moment``, and wait up to ``limit`` seconds after that for the others."""
    context = mp.get_context(START["method"])
    port, started = free_port(), time.time()
    processes, pipes = [], []
    arguments: tuple[Any, ...] = (world, str(folder), attempt, settings)
    if victim is not None and moment is not None and moment.kind in FAILURES:
        arguments += (1, [Failure(moment.kind, victim, moment.count, folder, attempt)])
    for rank in range(world):
        ours, theirs = context.Pipe()
        life = (output_of(folder, attempt, rank), rank, world, port, train, arguments, theirs)
        processes.append(context.Process(target=run_rank_with_output, args=life))
        processes[-1].start()
        theirs.close()  # The death of the child then reads as the end of the pipe.
        pipes.append(ours)
    outcome = Outcome()
    if victim is not None and moment is not None:
        outcome.failed = _let_fail(processes[victim], folder, attempt, victim, moment)
    hangs = {victim} if moment is not None and moment.kind == "hang" else set()
    outputs = [output_of(folder, attempt, rank) for rank in range(world)]
    _await_ends(outcome, processes, pipes, outputs, hangs, limit)
    let_end(pipes)
    for process in processes:
        process.kill()
        process.join()
    begins = [json.loads(line)["time"] for line in _first_lines(folder, attempt)]
    outcome.start_seconds = max(begins) - started if len(begins) == world else None
    if victim in outcome.results:
        outcome.failed = False  # The rank had completed its training before.
    if outcome.failed and victim is not None and not (moment is not None and moment.kind in HITS_ALL_RANKS):
        outcome.message = outcome.errors.pop(victim, "")
        outcome.seconds.pop(victim, None)
    return outcome


def _await_ends(
    outcome: Outcome, processes: list[Any], pipes: list[Any], outputs: list[Path], hangs: set[int | None], limit: float
) -> None:
    """Wait up to ``limit`` seconds for the ends of all ranks but ``hangs``, and note them. Late ones print where they are."""
    begin = time.monotonic()
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    for end in (begin + LATE * limit, begin + limit):
        while set(waiting.values()) - hangs and (left := end - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), left):
                rank = waiting.pop(pipe)
                outcome.seconds[rank] = time.monotonic() - begin
                try:
                    status, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    processes[rank].join(END_SECONDS)
                    status, value = "error", death(outputs[rank], rank, processes[rank].exitcode)
                (outcome.results if status == "ok" else outcome.errors)[rank] = value
            if outcome.errors and not outcome.failed:
                outcome.stuck = sorted(set(waiting.values()) - hangs)
                return
        outcome.stuck = sorted(set(waiting.values()) - hangs)
        if outcome.stuck:
            ask_for_positions(processes[rank] for rank in outcome.stuck)
            time.sleep(PRINT_SECONDS)


def _let_fail(process: Any, folder: Path, attempt: int, victim: int, moment: Moment) -> bool:
    """Kill the process at the moment, or wait until it fails by itself. Return whether it was still running."""
    record = folder / moment.kind / f"{attempt}.{victim}.jsonl"
    by_itself = moment.kind in FAILURES
    count = 1 if by_itself else moment.count
    while moment.kind != "start" and _lines(record) < count and process.is_alive():
        time.sleep(POLL_SECONDS)
    if by_itself:
        return _lines(record) == count
    time.sleep(moment.delay)
    if not process.is_alive():
        return False
    os.kill(process.pid, signal.SIGKILL)
    return True


def _first_lines(folder: Path, attempt: int) -> list[str]:
    """The lines with which the ranks have noted the begin of the training. A rank may be killed before it has written one."""
    texts = (path.read_text() for path in (folder / "samples").glob(f"{attempt}.*.jsonl"))
    return [text.splitlines()[0] for text in texts if text]


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
