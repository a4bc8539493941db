"""HSTU with experts that the ranks share, in micro-chunks: equal to one chunk and to one process, the same order on all ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.models import HSTU, FeedForward, PersonalTokens
from lightning_freescale.models.micro_chunks import Samples, count_chunks
from lightning_freescale.models.moe.parallel import TravellingTokens
from lightning_freescale.runtime.errors import ConfigurationError
from tests.models.cases import make_batch
from tests.models.test_hstu import ITEMS, planted, tiny
from tests.ranks import run_ranks

WORLD = 4
SAMPLES = [5, 0, 1, 8]  # of each rank: one has none, and one has fewer than there are chunks
TOKENS = PersonalTokens(tokens=2, recent=3, refresh=2)
CASES: list[tuple[dict[str, Any], torch.dtype]] = [
    ({}, torch.float64),
    ({"bias": "input"}, torch.float32),
    ({"personalization": TOKENS}, torch.float64),
]


def make_model(chunks: int | None, options: dict[str, Any], dtype: torch.dtype) -> HSTU:
    settings = FeedForward(experts=8, top_k=2, hidden=8, expert_parallel=True, micro_chunks=chunks)
    model = tiny(feed_forward=settings, dropout=0.2, input_dropout=0.2, **options)
    for layer in model.feed_forwards:
        for parameter in layer.moe.parameters():  # type: ignore[union-attr]
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def make_parts() -> list[SeqBatch]:
    """The batch of each rank."""
    histories = iter(planted(sum(SAMPLES))[0])
    drawn = torch.randint(ITEMS, (sum(SAMPLES), 4), generator=torch.Generator().manual_seed(3))
    parts = drawn.split(SAMPLES)
    return [make_batch([next(histories) for _ in part], part.tolist()) for part in parts]


def whole_batch() -> SeqBatch:
    histories, _ = planted(sum(SAMPLES))
    drawn = torch.randint(ITEMS, (sum(SAMPLES), 4), generator=torch.Generator().manual_seed(3))
    return make_batch(histories, drawn.tolist())


def upstream(events: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(events, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def gradients(model: HSTU, loss: Tensor) -> dict[str, Tensor]:
    """The gradients of the parameters, summed over all ranks."""
    model.zero_grad()
    loss.backward()
    dtype = model.layers[0].f1.weight.dtype  # type: ignore[union-attr]
    named = dict(model.named_parameters())
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().to(dtype) for p in named.values()])
    if dist.is_initialized():
        dist.all_reduce(flat)
    return dict(zip(named, flat.split([p.numel() for p in named.values()]), strict=True))


class Rows:
    """Embeddings of a feature in the type of the model; TorchRec's lookup returns float32."""

    def __init__(self, values: Tensor):
        self._values = values

    def values(self) -> Tensor:
        return self._values


def look_up(model: HSTU, batch: SeqBatch) -> dict[str, Rows]:
    dtype = model.layers[0].f1.weight.dtype  # type: ignore[union-attr]
    return {name: Rows(rows.values().to(dtype)) for name, rows in model.embedding(batch.features).items()}


def results(model: HSTU, batch: SeqBatch, dout: Tensor) -> dict[str, Tensor]:
    """The output at the events and all gradients of a weighted sum of it; then the loss with those of the routers."""
    out = model.encode(look_up(model, batch), batch)
    found = {"out": out.detach()} | gradients(model, (out * dout).sum())
    loss = model.loss(look_up(model, batch), batch)
    return found | {"loss": loss.detach()} | {f"loss/{k}": v for k, v in gradients(model, loss).items()}


def run_cases(rank: int) -> list[list[dict[str, Tensor]]]:
    dist.init_process_group("gloo")
    batch = make_parts()[rank]
    found = []
    for options, dtype in CASES:
        events = [len(part.timestamps) for part in make_parts()]
        dout = upstream(sum(events), dtype).split(events)[rank]
        counts = (2, 1) if found else (2, 1, 3, 2)
        found.append([results(make_model(chunks, options, dtype), batch, dout) for chunks in counts])
    return found


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest difference, relative to the largest element of the same array."""
    return max(
        float((got[name] - value).abs().max() / value.abs().max().clamp(min=1e-3))
        for name, value in want.items()
        if value.numel()
    )


def without_loss(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the loss of a batch, which is a mean over the events of a rank and not of all ranks."""
    return {name: value for name, value in found.items() if not name.startswith("loss")}


def test_chunks_equal_one_chunk_and_one_process() -> None:
    """In float64 within 1e-12, in float32 within 1e-6, and repeatable to the bit."""
    ranks = run_ranks(run_cases, world=WORLD, timeout=120)
    for number, (options, dtype) in enumerate(CASES):
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        for found in ranks:
            two, *others = found[number]
            assert all(difference(other, two) < tolerance for other in others), options
            assert all(torch.equal(found[0][-1][name], value) for name, value in found[0][0].items())
        batch = whole_batch()
        model, dout = make_model(None, options, dtype), upstream(len(batch.timestamps), dtype)
        want = without_loss(results(model, batch, dout))
        got = ranks[0][number][0] | {"out": torch.cat([found[number][0]["out"] for found in ranks])}
        assert difference(got, want) < tolerance, options
        with torch.no_grad():  # negative control: one weight of one expert
            model.feed_forwards[1].moe.w_out[3, 2, 1] += 1e-3  # type: ignore[union-attr, operator, index]
        assert difference(got, without_loss(results(model, batch, dout))) > 1e-5


def open_as_on_cuda(tokens: TravellingTokens) -> None:
    """``TravellingTokens.open`` on CUDA, where the host does not wait for the counts at once."""
    tokens._counts = tokens._trip.exchange.start_counts(tokens._trip.index.counts, None)


def record_order(rank: int, as_on_cuda: bool) -> tuple[list[str], Tensor]:
    """What a layer does in forward and backward: transfers that start and are awaited, and attention. And its output."""
    dist.init_process_group("gloo")
    if as_on_cuda:
        TravellingTokens.open = open_as_on_cuda  # type: ignore[method-assign]  # of this process alone
    model = make_model(2, {"num_layers": 1}, torch.float32)
    log: list[str] = []
    exchange = model.feed_forwards[0].moe.expert_exchange  # type: ignore[union-attr]
    count = 0

    def observe(work: Any, sent_bytes: int) -> Any:
        nonlocal count
        count += 1
        number = count
        log.append(f"start {number}")

        @contextmanager
        def waiting() -> Any:
            log.append(f"wait {number}")
            yield

        return waiting

    exchange.observe = observe  # type: ignore[union-attr, assignment]
    layer = model.layers[0]
    layer.register_forward_hook(lambda *_: log.append("attention"))
    layer.register_full_backward_hook(lambda *_: log.append("attention backward"))
    out = model(make_parts()[rank])
    out.sum().backward()
    return log, out.detach()


def test_the_order_of_exchanges() -> None:
    """With two chunks, A and B, every exchange of one chunk runs during the compute of the other, where there is some."""
    at_once, later = ([*run_ranks(record_order, world=WORLD, args=(as_on_cuda,))] for as_on_cuda in (False, True))
    for ranks in (at_once, later):
        exchanges = [[entry for entry in log if entry.startswith(("start", "wait"))] for log, _ in ranks]
        assert all(other == exchanges[0] for other in exchanges)  # also the rank without samples
    assert all(torch.equal(a[1], b[1]) for a, b in zip(at_once, later, strict=True))
    rest = [
        *("wait 4", "start 6"),  # the experts of B, while the outputs of A travel; outputs of B
        *("wait 5", "wait 6"),
        *("start 7", "start 8"),  # gradients of the outputs: B, A
        *("wait 7", "start 9"),  # B: backward of the experts, gradients of the copies
        *("wait 8", "start 10"),  # A, while those of B travel
        *("wait 9", "attention backward"),  # B, while those of A travel
        *("wait 10", "attention backward"),
    ]
    assert at_once[0][0] == [
        *("attention", "start 1", "wait 1", "start 2"),  # A: counts, copies
        *("attention", "start 3", "wait 3", "start 4"),  # B
        *("wait 2", "start 5"),  # the experts of A, while the copies of B travel; outputs of A
        *rest,
    ]
    assert later[0][0] == [
        *("attention", "start 1"),  # A: counts
        *("attention", "wait 1", "start 2", "start 3"),  # B is queued; copies of A; counts of B
        *("wait 2", "wait 3", "start 4", "start 5"),  # the experts of A are queued; copies of B; outputs of A
        *rest,
    ]


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), max_size=12), count=st.integers(1, 4))
def test_parts_have_whole_samples(lengths: list[int], count: int) -> None:
    total = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.arange(total)
    parts = Samples(rows[:, None].double(), offsets, rows * 10, rows.int()).split(count)
    assert len(parts) == count
    assert torch.equal(torch.cat([part.offsets.diff() for part in parts]), torch.tensor(lengths, dtype=torch.int64))
    for part in parts:
        assert int(part.offsets[0]) == 0
        assert int(part.offsets[-1]) == len(part.x) == len(part.timestamps)
        assert part.keys is not None
        assert torch.equal(part.keys.long() * 10, part.timestamps)
        assert len(part.x) <= total / count + max(lengths, default=0)
    assert torch.equal(torch.cat([part.timestamps for part in parts]), rows * 10)


def test_wrong_settings_and_the_choice() -> None:
    with pytest.raises(ConfigurationError, match="micro_chunks must be at least 1, not 0"):
        FeedForward(experts=4, expert_parallel=True, micro_chunks=0)
    with pytest.raises(ConfigurationError, match="micro_chunks=2 needs expert_parallel=True"):
        FeedForward(experts=4, micro_chunks=2)
    for chunks in (None, 2):  # one process has nobody to exchange with
        layers: Any = make_model(chunks, {}, torch.float32).feed_forwards
        assert count_chunks(layers, torch.device("cpu")) == 1


def choose(rank: int) -> list[int]:
    dist.init_process_group("gloo")
    found = []
    for chunks in (None, 3):
        layers: Any = make_model(chunks, {}, torch.float32).feed_forwards
        found += [count_chunks(layers, torch.device(kind)) for kind in ("cpu", "cuda")]
        found.append(count_chunks(layers.eval(), torch.device("cuda")))
    return found


def test_the_choice_on_two_ranks() -> None:
    assert run_ranks(choose) == [[1, 2, 1, 3, 3, 1]] * 2
