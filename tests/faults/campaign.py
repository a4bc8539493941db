"""Many trainings with random settings, whose ranks are killed or fail otherwise, several of them at the same time."""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.faults.attempt import Moment, run_attempt
from tests.faults.checks import (
    check_samples,
    check_survivors,
    check_weights,
    largest_difference,
    no_new_device_memory,
    no_new_shared_memory,
)
from tests.faults.failures import FAILURES, end_mps_servers, mps_clients
from tests.faults.output import describe, shorten
from tests.faults.training import SAVE_EVERY, STEPS, Settings

WORLDS = (2, 3, 4)
MAX_KILLS = 3  # kills of one training, if nothing else is asked for
TIMEOUTS = {"cpu": 10.0, "cuda": 30.0}  # seconds, of the strategy
START_SECONDS = {"cpu": 1.0, "cuda": 8.0}  # A kill at the start takes place within this time.
MOMENTS = ("start", "forward", "backward", "exchange", "saves")


@dataclass
class TrainingResult:
    """What became of one training. ``problems`` is empty if everything holds."""

    seed: int
    worlds: list[int] = field(default_factory=list)  # the number of ranks of each attempt
    settings: dict[str, Any] = field(default_factory=dict)
    kills: list[dict[str, Any]] = field(default_factory=list)  # and other failures
    problems: list[str] = field(default_factory=list)
    restart_seconds: list[float] = field(
        default_factory=list
    )  # from the start of the processes to that of the training
    attempt_seconds: list[float] = field(default_factory=list)
    output: list[str] = field(default_factory=list)  # what the ranks of attempts with a problem have printed
    difference: str = ""  # the largest one between its weights and those of the undisturbed training


@dataclass(frozen=True)
class Plan:
    """What a training of a campaign is to go through.

    Attributes:
        kills: how many ranks are killed, one per attempt.
        failure: a failure of :data:`FAILURES` instead.
        alone: no other training runs at the same time, so what is left in memory after each attempt is its own.
        until: no rank is killed after this time of the monotonic clock.
        moments: what the ranks do when they are killed, some of :data:`MOMENTS`.
    """

    seed: int
    kills: int
    failure: str | None
    worlds: tuple[int, ...]
    device: str
    timeout: float
    alone: bool
    until: float
    moments: tuple[str, ...] = MOMENTS


def random_settings(numbers: random.Random, device: str, timeout: float) -> Settings:
    copies = random.Random(repr(numbers.getstate()))  # The other settings of a seed stay what they were without it.
    return Settings(
        device=device,
        timeout=timeout,
        prioritize=numbers.random() < 0.75,
        checkpoint=numbers.choice(["file", "sharded", "incremental"]),
        asynchronous=numbers.random() < 0.3,
        transport=numbers.choice(["auto", "host"]),
        host_copies=copies.random() < 0.5,
    )


def random_moment(
    numbers: random.Random, device: str, steps_left: int, kills_left: int, moments: Sequence[str] = MOMENTS
) -> Moment:
    """A moment in the steps that are left. The first of several kills come early, so that all of them take place."""
    kind = numbers.choice(moments) if steps_left else "start"
    if kind == "start":
        return Moment(kind, 0, numbers.uniform(0.0, START_SECONDS[device]))
    last = math.ceil(steps_left / kills_left)
    count = numbers.randint(1, max(1, last // SAVE_EVERY) if kind == "saves" else last)
    return Moment(kind, count, numbers.uniform(0.0, 0.03))


def steps_left(folder: Path) -> int:
    """How many steps follow the last save, complete or not."""
    saves = [json.loads(line) for path in (folder / "saves").glob("*.jsonl") for line in path.read_text().splitlines()]
    return STEPS - max((save["step"] for save in saves), default=0)


def reference(root: Path, world: int, device: str) -> None:
    """The undisturbed training."""
    folder = root / f"reference_{world}"
    outcome = run_attempt(world, folder, 0, Settings(timeout=60.0, device=device), limit=120.0)
    if outcome.errors or outcome.stuck:
        output = "\n".join(describe(folder, 0, world, outcome.errors))
        raise RuntimeError(
            f"the undisturbed training on {world} ranks failed, ranks that hang: {outcome.stuck}\n{output}"
        )


def reference_weights(root: Path, world: int) -> dict[str, Tensor]:
    """The weights of the undisturbed training, which has written them."""
    return torch.load(root / f"reference_{world}" / "weights.pt")


def disturbed_training(root: Path, plan: Plan) -> TrainingResult:
    """Run one training, kill ranks, restart it each time, and check the result."""
    with mps_clients() if plan.failure == "mps" else nullcontext():
        return _disturbed_training(root, plan)


def _disturbed_training(root: Path, plan: Plan) -> TrainingResult:
    numbers, folder = random.Random(plan.seed), root / str(plan.seed)
    settings = random_settings(numbers, plan.device, plan.timeout)
    result = TrainingResult(plan.seed, settings=asdict(settings))
    world = numbers.choice(plan.worlds)
    for attempt in range(100):
        left = plan.kills - len(result.kills) if time.monotonic() < plan.until else 0
        victim, moment = None, None
        if left:
            victim = numbers.randrange(world)
            moment = random_moment(numbers, plan.device, steps_left(folder), left, plan.moments)
            if plan.failure is not None:
                moment = Moment(plan.failure, numbers.randint(2, STEPS), 0.0)
        result.worlds.append(world)
        begin = time.monotonic()
        with ExitStack() as stack:
            if plan.alone:
                stack.enter_context(no_new_shared_memory(result.problems, plan.device))
                stack.enter_context(no_new_device_memory(result.problems, plan.device))
            if plan.failure == "mps":
                stack.callback(end_mps_servers)  # A server without clients takes memory of the device.
            outcome = run_attempt(world, folder, attempt, settings, victim, moment, limit=2 * settings.timeout + 10)
        result.attempt_seconds.append(time.monotonic() - begin)
        if attempt and outcome.start_seconds is not None:
            result.restart_seconds.append(outcome.start_seconds)
        if outcome.failed:
            assert moment is not None
            assert victim is not None
            result.kills.append({"attempt": attempt, "rank": victim, **asdict(moment), "seconds": outcome.seconds})
            if problems := check_survivors(outcome, victim, settings, moment.kind):
                result.problems += [f"attempt {attempt}, {moment.kind}: {problem}" for problem in problems]
                result.output += describe(folder, attempt, world, outcome.errors)
            if numbers.random() < 0.4:
                world = numbers.choice(plan.worlds)
        elif outcome.errors or outcome.stuck:
            result.problems.append(f"attempt {attempt}: {outcome.errors or f'ranks {outcome.stuck} hang'}")
            result.output += describe(folder, attempt, world, outcome.errors)
            return result
        elif not left or outcome.results:
            break
    expected = reference_weights(root, result.worlds[-1])
    result.difference = largest_difference(outcome.results[0], expected)
    exact = plan.device == "cpu" and len(set(result.worlds)) == 1
    result.problems += check_samples(folder) + check_weights(outcome.results[0], expected, exact)
    return result


def campaign(
    kills: int,
    seed: int,
    note: Callable[[TrainingResult], None] = lambda result: None,
    worlds: Sequence[int] = WORLDS,
    device: str = "cpu",
    timeout: float | None = None,
    *,
    parallel: int = 1,
    kills_each: int | None = None,
    failures: Sequence[str] = (),
    seconds: float = math.inf,
    moments: Sequence[str] = MOMENTS,
    shared_gpu: bool = False,
) -> dict[str, Any]:
    """Run trainings until ``kills`` ranks have been killed. ``note`` gets the result of each training.

    Args:
        parallel: number of trainings at the same time. If it is larger than 1, what is left in memory is looked at after the
            last training instead of after each attempt.
        kills_each: kills of each training; by default a random number up to :data:`MAX_KILLS`.
        failures: names of :data:`FAILURES`. Each happens in a training of its own.
        moments: what the ranks do when they are killed.
        seconds: no rank is killed after this time, so the campaign ends soon, maybe with fewer kills.
        shared_gpu: other programs use the GPU, too, so nobody can say whose memory stays in use on it.
    """
    root = Path(tempfile.mkdtemp(prefix="faults"))
    timeout = timeout or TIMEOUTS[device]
    begin = time.monotonic()
    common = {"worlds": tuple(sorted(worlds)), "device": device, "timeout": timeout}
    common |= {"alone": parallel == 1 and not shared_gpu, "until": begin + seconds, "moments": tuple(moments)}
    left_behind: list[str] = []
    done: list[TrainingResult] = []
    with (
        no_new_shared_memory(left_behind, device),
        nullcontext() if shared_gpu else no_new_device_memory(left_behind, device),
        # The ranks are forked from the processes of the pool, which have no other threads.
        ProcessPoolExecutor(parallel, get_context("fork")) as pool,
    ):
        for undisturbed in [pool.submit(reference, root, world, device) for world in sorted(worlds, reverse=True)]:
            undisturbed.result()
        for result in _run_trainings(pool, parallel, root, kills, seed, kills_each, list(failures), common):
            done.append(result)
            note(result)
            if not result.problems:
                shutil.rmtree(root / str(result.seed))
    totals = {"parallel": parallel, "seconds": time.monotonic() - begin, "timeout_seconds": timeout}
    return totals | summary(done) | {"left_behind": left_behind}


def _run_trainings(
    pool: ProcessPoolExecutor,
    parallel: int,
    root: Path,
    kills: int,
    seed: int,
    kills_each: int | None,
    failures: list[str],
    common: dict[str, Any],
) -> Iterator[TrainingResult]:
    """Start trainings as long as failures or kills are to come, ``parallel`` at a time."""
    running: dict[Future[TrainingResult], Plan] = {}
    number = seed * 100_000
    while True:
        more = kills - sum(plan.kills for plan in running.values() if plan.failure is None)
        late = time.monotonic() > common["until"]
        if len(running) < parallel and (failures or more > 0) and not late:
            failure = failures.pop(0) if failures else None
            wanted = 1 if failure else min(kills_each or random.Random(number).randint(1, MAX_KILLS), more)
            plan = Plan(number, wanted, failure, **common)
            running[pool.submit(disturbed_training, root, plan)] = plan
            number += 1
        elif running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                kills -= killed([result := future.result()])
                yield result
        else:
            return


def killed(results: Sequence[TrainingResult]) -> int:
    return sum(kill["kind"] not in FAILURES for result in results for kill in result.kills)


def summary(done: Sequence[TrainingResult]) -> dict[str, Any]:
    """The results of all trainings in numbers."""
    restarts = [seconds for result in done for seconds in result.restart_seconds]
    attempts = [seconds for result in done for seconds in result.attempt_seconds]
    survivors = [seconds for result in done for kill in result.kills for seconds in kill["seconds"].values()]
    return {
        "kills": killed(done),
        "trainings": len(done),
        "with_resharding": sum(len(set(result.worlds)) > 1 for result in done),
        "survivors": len(survivors),
        "median_end_seconds": statistics.median(survivors or [0.0]),
        "longest_end_seconds": max(survivors, default=0.0),
        "median_restart_seconds": statistics.median(restarts or [0.0]),
        "median_attempt_seconds": statistics.median(attempts or [0.0]),
        "problems": {result.seed: result.problems for result in done if result.problems},
        "last_lines": {result.seed: shorten(result.output) for result in done if result.output},
        "differences": {result.seed: result.difference for result in done},
        "by_moment": dict(Counter(kill["kind"] for result in done for kill in result.kills)),
        "by_checkpoint": dict(Counter(result.settings["checkpoint"] for result in done for _ in result.kills)),
    }
