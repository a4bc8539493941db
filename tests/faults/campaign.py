"""Many trainings with random settings, whose ranks are killed, and the checks of what they leave behind."""

from __future__ import annotations

import json
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import toy
from tests.faults.attempt import Moment, Outcome, run_attempt
from tests.faults.training import EPOCHS, SAVE_EVERY, STEPS, USERS, Settings

WORLDS = (2, 3, 4)
MAX_KILLS = 3  # kills of one training
TIMEOUTS = {"cpu": 10.0, "cuda": 30.0}  # seconds, of the strategy
DEVICE_MEMORY_MIB = 100  # A GPU that nobody uses may report a little more than before.
ROUNDING = {"rtol": 1e-3, "atol": 1e-4}  # of the weights, if the number of ranks has changed


@dataclass
class TrainingResult:
    """What became of one training. ``problems`` is empty if everything holds."""

    seed: int
    worlds: list[int] = field(default_factory=list)  # the number of ranks of each attempt
    settings: dict[str, Any] = field(default_factory=dict)
    kills: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    restart_seconds: list[float] = field(
        default_factory=list
    )  # from the start of the processes to the begin of the training


def random_settings(numbers: random.Random, device: str, timeout: float) -> Settings:
    return Settings(
        device=device,
        timeout=timeout,
        prioritize=numbers.random() < 0.75,
        checkpoint=numbers.choice(["file", "sharded", "incremental"]),
        asynchronous=numbers.random() < 0.3,
        transport=numbers.choice(["auto", "host"]),
    )


def random_moment(numbers: random.Random) -> Moment:
    kind = numbers.choice(["start", "samples", "samples", "saves"])
    if kind == "start":
        return Moment(kind, 0, numbers.uniform(0.0, 1.0))
    count = numbers.randint(1, STEPS) if kind == "samples" else numbers.randint(1, STEPS // SAVE_EVERY)
    return Moment(kind, count, numbers.uniform(0.0, 0.03))


def references(folder: Path, worlds: Sequence[int], device: str) -> dict[int, dict[str, Tensor]]:
    """The weights of the undisturbed training, for each number of ranks."""
    found = {}
    for world in worlds:
        outcome = run_attempt(
            world, folder / f"reference_{world}", 0, Settings(timeout=60.0, device=device), limit=120.0
        )
        if outcome.errors or outcome.stuck:
            raise RuntimeError(f"the undisturbed training on {world} ranks failed: {outcome.errors or outcome.stuck}")
        found[world] = outcome.results[0]
    return found


def disturbed_training(
    seed: int,
    folder: Path,
    expected: dict[int, dict[str, Tensor]],
    kills: int = MAX_KILLS,
    device: str = "cpu",
    timeout: float = TIMEOUTS["cpu"],
) -> TrainingResult:
    """Run one training, kill up to ``kills`` ranks, restart it each time, and check the result."""
    numbers = random.Random(seed)
    settings = random_settings(numbers, device, timeout)
    result = TrainingResult(seed, settings=asdict(settings))
    world, wanted = numbers.choice(sorted(expected)), numbers.randint(1, kills)
    for attempt in range(100):
        disturbed = len(result.kills) < wanted
        victim = numbers.randrange(world) if disturbed else None
        moment = random_moment(numbers) if disturbed else None
        result.worlds.append(world)
        with no_new_shared_memory(result.problems), no_new_device_memory(result.problems, device):
            outcome = run_attempt(world, folder, attempt, settings, victim, moment, limit=2 * settings.timeout + 10)
        if attempt and outcome.start_seconds is not None:
            result.restart_seconds.append(outcome.start_seconds)
        if outcome.killed:
            assert moment is not None
            assert victim is not None
            result.kills.append({"attempt": attempt, "rank": victim, **asdict(moment), "seconds": outcome.seconds})
            result.problems += check_survivors(outcome, victim, settings)
            if numbers.random() < 0.4:
                world = numbers.choice(sorted(expected))
        elif outcome.errors or outcome.stuck:
            result.problems.append(f"attempt {attempt}: {outcome.errors or f'ranks {outcome.stuck} hang'}")
            return result
        elif not disturbed or outcome.results:
            break
    exact = device == "cpu"
    result.problems += check_samples(folder) + check_weights(outcome.results[0], expected, result.worlds, exact)
    return result


def check_survivors(outcome: Outcome, victim: int, settings: Settings) -> list[str]:
    """Every other rank ends within twice the timeout, and its error names the rank that was killed.

    A rank that is killed before all ranks have met may stay without a name. The error then says that some rank has not come.
    """
    problems = [f"rank {rank} hangs after the death of rank {victim}" for rank in outcome.stuck]
    for rank, text in outcome.errors.items():
        message = text.rsplit("\n  ", 1)[-1].partition("\n")[2] or text  # what follows the last line of the traceback
        if not re.search(rf"\brank {victim}\b|ranks have come within", message):
            problems.append(f"rank {rank} does not name rank {victim}: {message[:400]}")
    problems += [
        f"rank {rank} ended {seconds:.1f} s after the death of rank {victim}"
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


def check_weights(
    weights: dict[str, Tensor], expected: dict[int, dict[str, Tensor]], worlds: list[int], exact: bool = True
) -> list[str]:
    """The weights equal those of the undisturbed training: bitwise if the number of ranks was always the same, on a CPU."""
    reference = expected[worlds[-1]]
    if len(set(worlds)) == 1 and exact:
        return [] if toy.same(weights, reference) else [f"the weights differ: {largest_difference(weights, reference)}"]
    close = all(torch.allclose(weights[name], value, **ROUNDING) for name, value in reference.items())
    return [] if close else [f"the weights differ by more than rounding: {largest_difference(weights, reference)}"]


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    name, size = max(((name, float((a[name] - b[name]).abs().max())) for name in b), key=lambda pair: pair[1])
    return f"{name} by {size:.2e}"


@contextmanager
def no_new_shared_memory(problems: list[str], folder: Path = Path("/dev/shm")) -> Iterator[None]:
    """Note a problem if files are left in shared memory."""
    names: Callable[[], set[str]] = lambda: {path.name for path in folder.glob("*freescale*")}  # noqa: E731
    before = names()
    yield
    if left := names() - before:
        problems.append(f"left in {folder}: {sorted(left)}")


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


def campaign(
    kills: int,
    seed: int,
    note: Callable[[TrainingResult], None] = lambda result: None,
    worlds: Sequence[int] = WORLDS,
    device: str = "cpu",
    timeout: float | None = None,
) -> dict[str, Any]:
    """Run trainings until ``kills`` ranks have been killed. ``note`` gets the result of each training."""
    root = Path(tempfile.mkdtemp(prefix="faults"))
    timeout = timeout or TIMEOUTS[device]
    expected = references(root, worlds, device)
    done: list[TrainingResult] = []
    while (killed := sum(len(result.kills) for result in done)) < kills:
        number = seed * 100_000 + len(done)
        most = min(MAX_KILLS, kills - killed)
        done.append(disturbed_training(number, root / str(number), expected, most, device, timeout))
        note(done[-1])
        if not done[-1].problems:
            shutil.rmtree(root / str(number))
    restarts = [seconds for result in done for seconds in result.restart_seconds]
    survivors = [seconds for result in done for kill in result.kills for seconds in kill["seconds"].values()]
    return {
        "kills": sum(len(result.kills) for result in done),
        "trainings": len(done),
        "with_resharding": sum(len(set(result.worlds)) > 1 for result in done),
        "survivors": len(survivors),
        "timeout_seconds": timeout,
        "median_end_seconds": statistics.median(survivors or [0.0]),
        "longest_end_seconds": max(survivors, default=0.0),
        "median_restart_seconds": statistics.median(restarts or [0.0]),
        "problems": {result.seed: result.problems for result in done if result.problems},
        "by_moment": dict(Counter(kill["kind"] for result in done for kill in result.kills)),
        "by_checkpoint": dict(Counter(result.settings["checkpoint"] for result in done for _ in result.kills)),
    }
