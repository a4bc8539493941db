"""The checks of a training whose ranks were killed: named errors, samples, weights, and what it leaves in memory."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tests import toy
from tests.faults.attempt import Outcome
from tests.faults.failures import HITS_ALL_RANKS
from tests.faults.training import EPOCHS, USERS, Settings

CUDA_ERROR = r"CUDA (driver )?error: \S|\bcudaError[A-Z]|\bCUDA_ERROR_[A-Z]"
OTHER_PROGRAMS_SECONDS = 15.0  # after which files of other programs have vanished
DEVICE_MEMORY_MIB = 100  # A GPU that nobody uses may report a little more than before.
ROUNDING = {"rtol": 1e-3, "atol": 1e-4}  # of the weights, if the number of ranks has changed


def check_survivors(outcome: Outcome, victim: int, settings: Settings, kind: str = "start") -> list[str]:
    """Every other rank ends within twice the timeout, and its error names the rank that has failed.

    A rank that is killed before all ranks have met may stay without a name. The error then says that some rank has not come.
    After a failure that hits all ranks, the error of every rank names the error of CUDA.
    """
    problems = [f"rank {rank} hangs after the failure of rank {victim}" for rank in outcome.stuck]
    for rank, text in outcome.errors.items():
        if kind in HITS_ALL_RANKS:
            if not re.search(CUDA_ERROR, text):
                problems.append(f"rank {rank} names no error of CUDA: {text[-400:]}")
            continue
        message = text.rsplit("\n  ", 1)[-1].partition("\n")[2] or text  # what follows the last line of the traceback
        if not re.search(rf"\brank {victim}\b|ranks have come within", message):
            problems.append(f"rank {rank} does not name rank {victim}: {message[:400]}")
    if kind == "memory" and not re.search("memory", outcome.message):
        problems.append(f"rank {victim} does not say that its memory is used up: {outcome.message[-400:]}")
    problems += [
        f"rank {rank} ended {seconds:.1f} s after the failure of rank {victim}"
        for rank, seconds in outcome.seconds.items()
        if seconds > 2 * settings.timeout
    ]
    return problems


def check_samples(folder: Path) -> list[str]:
    """In the weights that are left, every user was trained once per epoch.

    The steps of an attempt that lie after the checkpoint from which the next attempt resumed are not in the weights.
    """
    trained: dict[int, list[tuple[int, int]]] = {}  # step: epoch and user
    attempts: dict[int, list[Path]] = {}
    for path in (folder / "samples").iterdir():
        attempts.setdefault(int(path.name.split(".")[0]), []).append(path)
    for attempt in sorted(attempts):
        records = [json.loads(line) for path in attempts[attempt] for line in path.read_text().splitlines()]
        begins = {record["begin"] for record in records if "begin" in record}
        if len(begins) != 1:
            return [f"attempt {attempt}: the ranks began at steps {sorted(begins)}"]
        begin = begins.pop()
        trained = {step: samples for step, samples in trained.items() if step <= begin}
        for record in records:
            if "step" in record:
                trained.setdefault(record["step"], []).extend((record["epoch"], user) for user in record["users"])
    counts = Counter(sample for samples in trained.values() for sample in samples)
    expected = Counter((epoch, user) for epoch in range(EPOCHS) for user in range(USERS))
    lost, twice = expected - counts, counts - expected
    return [
        f"{len(found)} samples {what}: {sorted(found)[:5]}"
        for what, found in (("lost", lost), ("trained twice", twice))
        if found
    ]


def check_weights(weights: dict[str, Tensor], reference: dict[str, Tensor], exact: bool) -> list[str]:
    """The weights equal those of the undisturbed training: bit for bit, or to rounding."""
    if exact:
        return [] if toy.same(weights, reference) else [f"the weights differ: {largest_difference(weights, reference)}"]
    close = all(torch.allclose(weights[name], value, **ROUNDING) for name, value in reference.items())
    return [] if close else [f"the weights differ by more than rounding: {largest_difference(weights, reference)}"]


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    name, size = max(((name, float((a[name] - b[name]).abs().max())) for name in b), key=lambda pair: pair[1])
    return f"{name} by {size:.2e}"


def has_no_owner(path: Path) -> bool:
    """Whether no living process holds the lock of a segment, as its owner does."""
    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return False
    return True


@contextmanager
def no_new_shared_memory(problems: list[str], device: str, folder: Path = Path("/dev/shm")) -> Iterator[None]:
    """Note a problem if segments of the transport are left in shared memory.

    A file that a process still uses belongs to another program. So does one that vanishes within some seconds. On a CPU the ranks
    use gloo, which has no such segments: all of them belong to tests that run at the same time.
    """
    if device == "cpu":
        yield
        return
    before = set(folder.glob("freescale-*"))
    yield
    left = {path for path in set(folder.glob("freescale-*")) - before if has_no_owner(path)}
    deadline = time.monotonic() + OTHER_PROGRAMS_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left = {path for path in left if path.exists()}
    if left:
        problems.append(f"left in {folder}: {sorted(path.name for path in left)}")


@contextmanager
def no_new_device_memory(problems: list[str], device: str) -> Iterator[None]:
    """Note a problem if memory of the GPU stays in use."""
    if device == "cpu":
        yield
        return

    def used() -> int:  # MiB
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0])

    before = used()
    yield
    time.sleep(1.0)  # The driver frees the memory of a killed process a moment later.
    if (more := used() - before) > DEVICE_MEMORY_MIB:
        problems.append(f"{more} MiB of the GPU stay in use")
