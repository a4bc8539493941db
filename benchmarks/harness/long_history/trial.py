"""One training of an HSTU on long histories, and the quality of its predictions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness.long_history.data import LongHistories
from lightning_freescale.batch import seq_batch
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.models import HSTU, PersonalTokens
from lightning_freescale.models.norm import unit_rows

SECONDS = 60  # between events


@dataclass(frozen=True)
class TrialOptions:
    """A model and its training.

    Attributes:
        kind: ``"full"``: every event sees all earlier ones. ``"recent"``: histories are cut into windows, and predictions see
            the recent events alone. ``"tokens"``: personal tokens.
        cut: tokens, and which events are recent, also for ``"recent"``.
        steps: training steps.
        samples: of a step; a window is a sample.
        negatives: sampled items of each sample.
        events: most events of a batch in evaluation.
        lr: learning rate at first; a cosine lowers it to 0.
        model: options of HSTU.
    """

    kind: str
    cut: PersonalTokens
    steps: int
    samples: int = 64
    negatives: int = 128
    events: int = 20_000
    lr: float = 2e-3
    model: dict[str, Any] = field(default_factory=dict)


def make_batch(
    histories: Sequence[NDArray[np.int64]],
    device: torch.device,
    first: Sequence[int] | None = None,
    drawn: Tensor | None = None,
) -> SeqBatch:
    """The samples of ``histories``. ``first``: number of the first event of each; ``drawn [n, K]``: sampled negatives."""
    lengths = torch.tensor([len(items) for items in histories])
    starts = np.zeros(len(histories), dtype=np.int64) if first is None else np.asarray(first)
    times = np.concatenate([np.arange(at, at + len(own)) for at, own in zip(starts, histories, strict=True)]) * SECONDS
    negatives = torch.zeros(len(histories), 0, dtype=torch.int64) if drawn is None else drawn
    values = torch.cat([torch.from_numpy(np.concatenate(histories)), negatives.flatten()])
    counts = torch.cat([lengths, torch.full_like(lengths, negatives.shape[1])])
    features = seq_batch.KeyedJaggedTensor(keys=[HISTORY, NEGATIVES], values=values, lengths=counts)
    return SeqBatch(features, torch.from_numpy(times)).to(device)


def windows(items: Sequence[NDArray[np.int64]], cut: PersonalTokens) -> list[NDArray[np.int64]]:
    """Each history in windows: the recent events, and before them windows of ``recent + refresh`` events."""
    found = []
    for own in items:
        end = int(cut.history_lengths(np.array([len(own)]))[0])
        size = cut.recent + cut.refresh
        edges = [0, *range(end % size or size, end + 1, size), len(own)] if end else [0, len(own)]
        found += [own[a:b] for a, b in itertools.pairwise(edges) if b - a > 1]
    return found


def train(
    data: LongHistories,
    options: TrialOptions,
    seed: int,
    device: torch.device,
    watch: Callable[[int, HSTU], Any] | None = None,
) -> tuple[HSTU, float]:
    """The trained model, and the median seconds of a step. ``watch`` is called after each step."""
    torch.manual_seed(seed)
    chance = np.random.default_rng(seed)
    samples = windows(data.items, options.cut) if options.kind == "recent" else data.items
    longest = max(len(own) for own in data.cases)
    model = HSTU(
        data.num_items,
        max_history=longest + 1,
        lr=options.lr,
        max_steps=options.steps,
        warmup_steps=options.steps // 20,
        personalization=options.cut if options.kind == "tokens" else None,
        **options.model,
    ).to(device)
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    order = _shuffled(len(samples), options.samples, chance)
    seconds = []
    for step in range(options.steps):
        begin = time.perf_counter()
        drawn = torch.from_numpy(chance.integers(data.num_items, size=(options.samples, options.negatives)))
        batch = make_batch([samples[at] for at in next(order)], device, drawn=drawn)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model.loss(model.embedding(batch.features), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        seconds.append(time.perf_counter() - begin)
        if watch is not None:
            watch(step + 1, model)
    return model.eval(), float(np.median(seconds))


def _shuffled(count: int, size: int, chance: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Numbers of the samples of each step: all samples in random order, again and again."""
    queue = np.empty(0, dtype=np.int64)
    while True:
        while len(queue) < size:
            queue = np.concatenate([queue, chance.permutation(count)])
        yield queue[:size]
        queue = queue[size:]


def evaluate(
    model: HSTU,
    data: LongHistories,
    options: TrialOptions,
    device: torch.device,
    age: int = 0,
    dropped: bool = False,
    least: int = 0,
) -> dict[str, float]:
    """HR@10 and NDCG@10 over all cases with more than ``least`` events of history.

    Args:
        age: the state of a user is so many events older than it has to be; at most ``least``.
        dropped: of the events since the state, only ``recent + refresh - 1`` are given to the model, the latest.
    """
    cut = options.cut
    past = cut.history_lengths(np.array([len(own) for own in data.cases]))
    chosen = np.flatnonzero(past > least)
    chosen = chosen[np.argsort([len(data.cases[at]) for at in chosen], kind="stable")]
    items = unit_rows(model.embedding.embeddings["item"].weight.detach().float())
    ranks = []
    for group in _groups([len(data.cases[at]) for at in chosen], options.events):
        numbers = chosen[group]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            own = [data.cases[at] for at in numbers]
            outputs = last_outputs(model, own, past[numbers] - age, options, device, dropped)
        scores = outputs.float() @ items.T
        target = scores.gather(1, torch.from_numpy(data.targets[numbers]).to(device)[:, None])
        ranks.append(((scores > target).sum(1) + ((scores == target).sum(1) - 1) / 2).cpu())
    rank = torch.cat(ranks)
    return {
        "HR@10": float((rank < 10).float().mean()),
        "NDCG@10": float(torch.where(rank < 10, 1 / (rank + 2).log2(), 0.0).mean()),
        "cases": len(rank),
    }


def serving_flops(model: HSTU, data: LongHistories, options: TrialOptions) -> float:
    """Mean FLOPs of a forward pass for a case with a history: the products of the layers. A state is there already."""
    lengths = np.array([len(own) for own in data.cases], dtype=np.float64)
    past = options.cut.history_lengths(lengths)
    rows = lengths if options.kind == "full" else lengths - past
    states = options.cut.segments * options.cut.tokens if options.kind == "tokens" else 0
    pairs = rows * (rows + 1) / 2 + rows * states
    linear, attention = _forward_costs(model)
    return float((linear * rows + attention * pairs)[past > 0].mean())


def _forward_costs(model: HSTU) -> tuple[float, float]:
    """FLOPs for a row, and for a pair of rows, of a forward pass."""
    heads, layers = model.hparams["num_heads"], len(model.layers)
    return model.cost_coefficients()[0] / 3, 2.0 * layers * heads * (model.qk_dim + model.v_dim)


@torch.no_grad()
def last_outputs(
    model: HSTU,
    cases: list[NDArray[np.int64]],
    past: NDArray[np.int64],
    options: TrialOptions,
    device: torch.device,
    dropped: bool,
) -> Tensor:
    """The output at the last event of each case, ``[n, D]``, where ``past [n]`` events are history."""
    if options.kind == "full":
        batch = make_batch(cases, device)
        return model(batch)[batch.lengths.cumsum(0) - 1]
    keep = options.cut.recent + options.cut.refresh - 1
    starts = [max(int(at), len(own) - keep) if dropped else int(at) for at, own in zip(past, cases, strict=True)]
    recent = make_batch([own[at:] for at, own in zip(starts, cases, strict=True)], device, starts)
    if options.kind == "recent":
        outputs = model(recent)
    else:
        states = model.compress(make_batch([own[:at] for at, own in zip(past, cases, strict=True)], device))
        outputs = model.encode_recent(recent, states)
    return outputs[recent.lengths.cumsum(0) - 1]


def _groups(lengths: Sequence[int], events: int) -> Iterator[slice]:
    """Consecutive cases with at most ``events`` events together, at least one."""
    start = total = 0
    for at, length in enumerate(lengths):
        if total + length > events and at > start:
            yield slice(start, at)
            start, total = at, 0
        total += length
    if start < len(lengths):
        yield slice(start, len(lengths))
