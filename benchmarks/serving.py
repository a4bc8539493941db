"""Latency of recommendations for long histories: full history, personal tokens, and personal tokens with a stored state.

    python -m benchmarks.serving [--quick] [--json] [--output FILE] [--device cpu|cuda] [--rounds 3] [--batches N ...]

A user has 1,024 events of history and 256 recent events. The item ids and times of a request are in host memory, and so is the
answer. The variants are an HSTU over all 1,280 events; an HSTU with 4 personal tokens over all events; and the same with the keys
and values of the tokens from a store of 1,024 users in the memory of the device. Each is timed up to the output at the last
event, and up to the best 10 of 100,000 items. All variants run in turn in each round with the same means: on a CPU float32 and
one thread; on CUDA bfloat16 with the fused layer, as CUDA graphs, and at batch 1 also as single launches. ``ratio`` is the median
of a round divided by that of the full history. Its spread is over the rounds. On CUDA a second table has the kernels, copies and
fills of a request, and the time in which they ran, from torch's profiler: the rest of a latency is the time between them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if __name__ == "__main__" and not __package__:  # started as a file: make the repository importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import report
from lightning_freescale.batch.plain_jagged import PlainJagged
from lightning_freescale.batch.seq_batch import HISTORY
from lightning_freescale.models import HSTU, PersonalTokens
from lightning_freescale.models.norm import unit_rows
from lightning_freescale.models.personalization import UserStates
from lightning_freescale.models.top_k import top_k

PAST, RECENT, TOKENS, BEST = 1024, 256, 4, 10
STORED = 1024  # users whose states are in the store
FULL, UNCACHED, CACHED = "full history", "personal tokens", "personal tokens, stored state"


class ServingShape(NamedTuple):
    """A model, its catalogue, and how often each batch size is timed in a round."""

    layers: int
    width: int
    heads: int
    items: int
    repeats: dict[int, int]


SHAPES = {
    "cpu": ServingShape(2, 64, 2, 100_000, {1: 15, 32: 3, 256: 1}),
    "cuda": ServingShape(8, 512, 4, 100_000, {1: 200, 32: 60, 256: 20}),
}
QUICK = ServingShape(1, 16, 2, 1000, {1: 3, 2: 2})


class Rows:
    """Embeddings of a feature, as a lookup returns them."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def values(self) -> Tensor:
        return self._values


@dataclass
class Request:
    """``users`` users with ``events`` events each, in tensors that a CUDA graph reads."""

    users: Tensor
    items: Tensor
    timestamps: Tensor
    lengths: Tensor

    @staticmethod
    def make(users: int, events: int, num_items: int, seed: int) -> Request:
        chance = torch.Generator().manual_seed(seed)
        times = torch.randint(1, 7200, (users, events), generator=chance).cumsum(1).flatten()
        items = torch.randint(num_items, (users * events,), generator=chance)
        return Request(torch.arange(users) % STORED, items, times, torch.full((users,), events))

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.users, self.items, self.timestamps

    @property
    def by_key(self) -> dict[str, PlainJagged]:
        """As in a batch."""
        return {HISTORY: PlainJagged(self.items, self.lengths)}

    def to(self, device: torch.device) -> Request:
        return Request(*(part.to(device) for part in (*self.parts(), self.lengths)))


class Served:
    """One variant for one batch size.

    Args:
        model: the model.
        store: the states of the users for a stored state, else ``None``.
        catalogue: ``[items, D]``, rows of length 1.
        request: of the shape that all requests have.
        graph: run as CUDA graphs: one for the outputs, one for the best items.
    """

    def __init__(self, model: HSTU, store: UserStates | None, catalogue: Tensor, request: Request, graph: bool):
        self.model, self.store, self.catalogue = model, store, catalogue
        self.device = catalogue.device
        self.table: Tensor = model.embedding.embeddings["item"].weight.detach()
        self.given = request.to(self.device)
        self.graphs: list[Any] = []
        self._warm_up()
        if graph:
            self.graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
            with torch.cuda.graph(self.graphs[0]):
                self.outputs = self._compute_outputs()
            with torch.cuda.graph(self.graphs[1]):
                self.answer = self._compute_best()

    def __call__(self, request: Request) -> tuple[float, float]:
        """Milliseconds for a request in host memory: up to the outputs, and up to the best items in host memory."""
        begin = time.perf_counter()
        for ours, theirs in zip(self.given.parts(), request.parts(), strict=True):
            ours.copy_(theirs, non_blocking=True)
        if self.graphs:
            self.graphs[0].replay()
        else:
            self.outputs = self._compute_outputs()
        self._wait()
        middle = time.perf_counter()
        if self.graphs:
            self.graphs[1].replay()
        else:
            self.answer = self._compute_best()
        for part in self.answer:
            part.cpu()
        return 1e3 * (middle - begin), 1e3 * (time.perf_counter() - begin)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _warm_up(self) -> None:
        """Compile and allocate outside of a graph."""
        stream = torch.cuda.stream(torch.cuda.Stream()) if self.device.type == "cuda" else contextlib.nullcontext()
        with stream:
            self.outputs = self._compute_outputs()
            self.answer = self._compute_best()
        self._wait()

    @torch.no_grad()
    def _compute_outputs(self) -> Tensor:
        """The output at the last event of each user, ``[B, D]``."""
        given: Any = self.given
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda, cache_enabled=False):
            embedded = {HISTORY: Rows(self.table[given.items])}
            if self.store is None:
                return self.model.encode_last(embedded, given).float()
            return self.model.continue_from(self.store.choose(given.users), embedded, given, last=True).float()

    @torch.no_grad()
    def _compute_best(self) -> tuple[Tensor, ...]:
        return tuple(top_k(self.outputs, self.catalogue, len(self.catalogue), BEST))

    def device_work(self) -> dict[str, tuple[float, float]]:
        """Launches, with copies and fills, and the milliseconds in which they ran: of the outputs, and of the best items."""
        return {"outputs": count_work(self._compute_outputs), "best 10": count_work(self._compute_best)}


def count_work(compute: Callable[[], Any], calls: int = 3) -> tuple[float, float]:
    """Launches on the device and milliseconds of all of them, for one call of ``compute`` outside of a CUDA graph."""
    compute()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(calls):
            compute()
        torch.cuda.synchronize()
    found = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(found) / calls, sum(event.device_time for event in found) / 1e3 / calls


def make_models(shape: ServingShape, device: torch.device) -> dict[str, HSTU]:
    """The model of each variant, with random weights: the time does not depend on them."""
    models = {}
    for name, tokens in ((FULL, None), (UNCACHED, PersonalTokens(TOKENS, RECENT, 64))):
        torch.manual_seed(0)
        model = HSTU(
            shape.items,
            embedding_dim=shape.width,
            num_layers=shape.layers,
            num_heads=shape.heads,
            max_history=PAST + RECENT,
            personalization=tokens,
        )
        models[name] = model.eval().to(device)
        if device.type == "cuda":  # autocast would convert the weights for every request
            for layer in model.layers:
                layer.f1.bfloat16()  # type: ignore[union-attr,operator]
                layer.f2.bfloat16()  # type: ignore[union-attr,operator]
    return models | {CACHED: models[UNCACHED]}


def make_store(model: HSTU, shape: ServingShape, device: torch.device) -> UserStates:
    """States of ``STORED`` users of the right shape, with random numbers."""
    heads, width = shape.heads, shape.width // shape.heads
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    keys, values = torch.randn(2, len(model.layers), STORED, TOKENS, heads, width, device=device, dtype=kind)
    lengths = torch.full((STORED,), PAST, device=device)
    return UserStates(keys, values, lengths, torch.zeros(STORED, 1, device=device).long())


class Measured(NamedTuple):
    """Milliseconds of the calls of each round: up to the outputs, and up to the best items."""

    outputs: list[list[float]]
    best: list[list[float]]


def measure(
    models: dict[str, HSTU], shape: ServingShape, device: torch.device, users: int, rounds: int, graph: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two rows for each variant: the outputs alone, and with the best items. With ``graph`` also two rows of its device work."""
    catalogue = unit_rows(models[FULL].embedding.embeddings["item"].weight.detach())
    store = make_store(models[CACHED], shape, device)
    calls: dict[str, tuple[Served, Request]] = {}
    for name, model in models.items():
        request = Request.make(users, RECENT if name == CACHED else PAST + RECENT, shape.items, seed=users)
        if device.type == "cuda":
            request = Request(*(part.pin_memory() for part in (*request.parts(), request.lengths)))
        calls[name] = Served(model, store if name == CACHED else None, catalogue, request, graph), request
    times = {name: Measured([], []) for name in calls}
    for _ in range(rounds):
        for name, (served, request) in calls.items():
            found = [served(request) for _ in range(shape.repeats.get(users, 1))]
            times[name].outputs.append([first for first, _ in found])
            times[name].best.append([last for _, last in found])
    launch = "CUDA graphs" if graph else "single launches" if device.type == "cuda" else "CPU"
    labels = {"batch": users, "launch": launch}
    rows = []
    for what, part in (("outputs", 0), ("outputs and best 10", 1)):
        for name in calls:
            row = _statistics(times[name][part], times[FULL][part], users)
            rows.append(labels | {"what": what, "variant": name} | row)
    work = []
    for name, (served, _) in calls.items() if graph else ():
        for what, (launches, busy) in served.device_work().items():
            work.append({"batch": users, "variant": name, "what": what, "launches": launches, "busy ms": busy})
    return rows, work


def _statistics(times: list[list[float]], full: list[list[float]], users: int) -> dict[str, Any]:
    """Of the calls of each round, compared with those of the full history."""
    every = [value for found in times for value in found]
    ratios = [statistics.median(own) / statistics.median(other) for own, other in zip(times, full, strict=True)]
    middle = statistics.median(every)
    return {
        "p50 ms": middle,
        "p99 ms": float(np.percentile(every, 99)),
        "calls": len(every),
        "users/s": 1e3 * users / middle,
        "ratio": statistics.median(ratios),
        "spread": f"{min(ratios):.3f} to {max(ratios):.3f}",
    }


def parse() -> argparse.Namespace:
    parser = report.make_parser(__doc__, quick="a tiny model, few calls")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument("--rounds", type=int, default=3, help="times that every variant is measured (default: 3)")
    parser.add_argument("--batches", type=int, nargs="+", metavar="N", help="batch sizes; default 1 32 256")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    shape = QUICK if arguments.quick else SHAPES[arguments.device]
    models = make_models(shape, device)
    rows: list[dict[str, Any]] = []
    work: list[dict[str, Any]] = []
    for users in arguments.batches or shape.repeats:
        for graph in (True, False) if device.type == "cuda" else (False,):
            if not graph and device.type == "cuda" and users > 1:
                continue
            found = measure(models, shape, device, users, arguments.rounds, graph)
            rows, work = rows + found[0], work + found[1]
            print(f"batch {users}: measured", file=sys.stderr, flush=True)
    machine = f"one of {os.cpu_count()} cores ({platform.machine()})"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name()
    model = {"layers": shape.layers, "width": shape.width, "heads": shape.heads, "items": shape.items}
    title = f"{shape.layers} layers of {shape.width}, {PAST} + {RECENT} events, {shape.items:,} items"
    results = {"model": model, "events": {"history": PAST, "recent": RECENT, "tokens": TOKENS}, "serving": rows}
    tables = {title: rows}
    if work:
        results["device work"] = tables["Kernels, copies and fills of a request, and the time in which they ran"] = work
    report.publish(arguments, report.head("serving", machine) | results, tables)


if __name__ == "__main__":
    main()
