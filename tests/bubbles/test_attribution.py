"""Attribution against a slow reference that labels every tick of every rank's step."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_freescale.bubbles.attribution import (
    EXPERT_SLOTS,
    PARTS,
    SLOTS,
    WIDTH,
    Bubbles,
    account,
    attribute,
    flatten,
    label,
    overlap,
    union,
)
from lightning_freescale.bubbles.spans import EXCHANGES, Kind, Role, Span, Step

WALL = 40  # ticks


def step(*spans: Span, start: float = 0.0, end: float = WALL) -> Step:
    return Step(0, start, end, spans)


def span(kind: str, start: float, end: float, joined: float | None = None, track: str = "compute") -> Span:
    return Span(Kind(kind), track, float(start), float(end), float(start if joined is None else joined))


def bubbles(*ranks: Step, offsets: list[float] | None = None) -> Bubbles:
    offsets = offsets or [0.0] * len(ranks)
    return attribute(np.stack([account(rank, offset)[None] for rank, offset in zip(ranks, offsets, strict=True)]))


def parts(result: Bubbles, rank: int) -> dict[str, float]:
    return {name: float(values[rank, 0]) for name, values in result.parts.items() if values[rank, 0]}


# ---- the reference: one label per tick -----------------------------------------------------------------------------
def label_ticks(ranks: list[Step]) -> list[dict[str, float]]:
    """Per rank, the seconds of each part, of ``useful`` and of ``hidden``. Ticks are one second; spans begin and end on them."""
    arrivals: dict[tuple[Kind, int], float] = {}
    numbered: list[dict[Span, int]] = []
    for rank in ranks:
        seen: dict[Kind, int] = {}
        numbered.append({})
        for item in sorted(rank.spans, key=lambda item: item.start):
            if item.track == "compute" and item.kind in EXCHANGES:
                numbered[-1][item] = seen[item.kind] = seen.get(item.kind, -1) + 1
                key = (item.kind, seen[item.kind])
                arrivals[key] = max(arrivals.get(key, -math.inf), item.joined)
    results = []
    for rank, numbers in zip(ranks, numbered, strict=True):
        total = dict.fromkeys((*PARTS, "useful", "hidden"), 0.0)
        for tick in range(int(rank.start), int(rank.end)):
            covering = [s for s in rank.spans if s.track == "compute" and s.start <= tick < s.end]
            inner = max(covering, key=lambda s: s.start, default=None)
            label = "other"
            if inner is not None and inner.kind.role is Role.COMPUTE:
                label = "useful"
            elif inner is not None and inner.kind.role is Role.WAITING:
                label = "input_wait"
            elif inner is not None and inner.kind in EXCHANGES:
                late = arrivals[inner.kind, numbers[inner]]
                own = {Kind.ALLREDUCE: "exposed_dense", Kind.EXPERT_EXCHANGE: "exposed_experts"}
                exposed = own.get(inner.kind, "exposed_embedding")
                label = "straggler" if tick < late else exposed
            total[label] += 1
            if label == "useful" and any(
                s.track != "compute" and s.kind in EXCHANGES and s.start <= tick < s.end for s in rank.spans
            ):
                total["hidden"] += 1
        results.append(total)
    return results


@st.composite
def engine_spans(draw: st.DrawFn) -> list[Span]:
    """Compute spans that may nest, exchanges and waits without spans inside them, and background exchanges."""
    spans: list[Span] = []
    compute = [Kind.DENSE_FORWARD, Kind.DENSE_BACKWARD, Kind.OPTIMIZER, Kind.METRICS, Kind.LOOKUP]
    starts = draw(st.lists(st.integers(0, WALL - 1), max_size=5, unique=True))
    for start in starts:
        kind = draw(st.sampled_from(compute))
        spans.append(span(kind, start, draw(st.integers(start, WALL))))
    cursor = draw(st.integers(0, 6))
    while cursor < WALL and len(spans) < 12:
        end = draw(st.integers(cursor, min(WALL, cursor + 12)))
        covered = [s for s in spans if cursor <= s.start < end]
        if covered:  # avoid spans that begin inside the wait; test_interrupted_wait covers them
            cursor += 1
            continue
        kind = draw(st.sampled_from([*EXCHANGES, Kind.INPUT_WAIT, Kind.H2D]))
        spans.append(span(kind, cursor, end, joined=draw(st.integers(max(0, cursor - 5), cursor))))
        cursor = end + draw(st.integers(1, 8))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, WALL))
        spans.append(span(draw(st.sampled_from(EXCHANGES)), start, draw(st.integers(start, WALL)), track="exchange"))
    return spans


@settings(max_examples=150, deadline=None)
@given(st.lists(engine_spans(), min_size=1, max_size=4))
def test_equal_to_the_reference(ranks: list[list[Span]]) -> None:
    steps = [step(*spans) for spans in ranks]
    result = bubbles(*steps)
    for rank, expected in enumerate(label_ticks(steps)):
        got = {name: values[rank, 0] for name, values in result.parts.items()}
        got |= {"useful": result.useful[rank, 0], "hidden": result.hidden[rank, 0]}
        assert got == pytest.approx(expected, abs=1e-9)
        assert sum(values[rank, 0] for values in result.parts.values()) == pytest.approx(result.bubble[rank, 0])


# ---- known cases ---------------------------------------------------------------------------------------------------
def test_straggler_wait_and_transfer_are_separated() -> None:
    """Rank 1 computes 10 seconds longer. The exchange then takes 4 seconds on both ranks."""
    early = step(span("dense_forward", 0, 10), span("gradient_exchange", 10, 24), span("optimizer", 24, 40))
    late = step(span("dense_forward", 0, 20), span("gradient_exchange", 20, 24), span("optimizer", 24, 40))
    result = bubbles(early, late)
    assert parts(result, 0) == {"straggler": 10, "exposed_embedding": 4}
    assert parts(result, 1) == {"exposed_embedding": 4}
    assert result.bubble[:, 0].tolist() == [14, 4]


def test_a_rank_that_joins_early_and_waits_late_is_no_straggler() -> None:
    """Rank 1 joins at 5 and waits at 20. Rank 0 waits from 10 on, so it waits only for the link."""
    first = step(span("row_exchange_exclusive", 10, 15, joined=4))
    second = step(span("row_exchange_exclusive", 20, 20, joined=5))
    assert parts(bubbles(first, second), 0) == {"exposed_embedding": 5, "other": 35}


def test_allreduce_and_input_have_their_own_parts() -> None:
    only = step(span("input_wait", 0, 3), span("h2d", 3, 5), span("dense_backward", 5, 30), span("allreduce", 20, 30))
    result = bubbles(only)
    assert parts(result, 0) == {"input_wait": 5, "exposed_dense": 10, "other": 10}
    assert result.useful[0, 0] == 15


def test_clocks_are_aligned_by_the_offset() -> None:
    early = step(span("allreduce", 10, 24))
    late = Step(0, 1000.0, 1040.0, (span("allreduce", 1020, 1024),))
    assert parts(bubbles(early, late, offsets=[0.0, -1000.0]), 0)["straggler"] == 10
    assert parts(bubbles(early, late), 0) == {"straggler": 14, "other": 26}  # without the offset the result is wrong


def test_waits_of_zero_length_are_matched_too() -> None:
    first = step(span("id_exchange", 5, 5), span("id_exchange", 10, 20))
    second = step(span("id_exchange", 4, 5), span("id_exchange", 15, 20))
    result = bubbles(first, second)
    assert parts(result, 0)["straggler"] == 5
    assert parts(result, 1)["straggler"] == 1


def test_a_wait_with_unknown_join_times_is_exposed() -> None:
    first = step(span("row_exchange_exclusive", 10, 20, joined=math.nan))
    second = step(span("row_exchange_exclusive", 15, 20, joined=math.nan))
    assert parts(bubbles(first, second), 0)["exposed_embedding"] == 10
    known = step(span("row_exchange_exclusive", 15, 20, joined=12))
    assert parts(bubbles(first, known), 0)["straggler"] == 2


@pytest.mark.parametrize(
    ("kind", "part", "slots"),
    [("id_exchange", "exposed_embedding", SLOTS), ("expert_exchange", "exposed_experts", EXPERT_SLOTS)],
)
def test_more_waits_than_slots_are_exposed(kind: str, part: str, slots: int) -> None:
    many = [span(kind, i, i + 0.5) for i in range(slots + 3)]
    late = [item._replace(joined=item.start + 0.25) for item in many]
    result = bubbles(step(*many, end=slots + 4), step(*late, end=slots + 4))
    assert parts(result, 0)["straggler"] == 0.25 * slots
    assert parts(result, 0)[part] == 0.25 * slots + 0.5 * 3


def test_only_the_wait_of_an_overlapped_expert_exchange_is_exposed() -> None:
    """A transfer from 2 to 8 during compute until 7: one second is waited for, and five are hidden."""
    transfer = span("expert_exchange", 2, 8, track="expert_exchange (async)")
    only = step(span("dense_forward", 0, 7), transfer, span("expert_exchange", 7, 8, joined=2))
    result = bubbles(only, only)
    assert parts(result, 0)["exposed_experts"] == 1
    assert "straggler" not in parts(result, 0)
    assert float(result.hidden[0, 0]) == 5


def test_interrupted_wait() -> None:
    """Compute inside a wait is useful. The remaining time of the wait is exposed."""
    only = step(span("row_exchange", 0, 10), span("lookup", 2, 6))
    result = bubbles(only)
    assert parts(result, 0) == {"exposed_embedding": 6, "other": 30}
    assert result.useful[0, 0] == 4


def test_hidden_communication_is_counted_once() -> None:
    only = step(
        span("dense_forward", 0, 20),
        span("row_exchange_exclusive", 5, 15, track="a"),
        span("row_exchange_collision", 10, 30, track="b"),
    )
    assert bubbles(only).hidden[0, 0] == 15


def test_flatten_union_overlap() -> None:
    outer, inner, crossing = span("dense_forward", 0, 10), span("metrics", 2, 4), span("optimizer", 8, 14)
    segments = [(s.start, s.end, s.span.kind) for s in flatten([outer, inner, crossing], 1, 12)]
    assert segments == [
        (1, 2, Kind.DENSE_FORWARD),
        (2, 4, Kind.METRICS),
        (4, 8, Kind.DENSE_FORWARD),
        (8, 12, Kind.OPTIMIZER),
    ]
    assert union([(3, 5), (1, 2), (4, 7), (7, 8), (9, 9)]) == [(1, 2), (3, 8)]
    assert overlap([(0, 4), (6, 9)], [(2, 7), (8, 12)]) == 4


def test_an_account_has_a_fixed_width() -> None:
    assert account(step()).shape == account(step(span("allreduce", 1, 2))).shape == (WIDTH,)


@settings(max_examples=60, deadline=None)
@given(st.lists(engine_spans(), min_size=1, max_size=3))
def test_labels_add_up_to_the_parts(ranks: list[list[Span]]) -> None:
    steps = [step(*spans) for spans in ranks]
    result = bubbles(*steps)
    for rank, labelled in enumerate(label(steps)):
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(labelled))
        straggler = sum(end - start for start, end, name in labelled if name == "straggler")
        dense = sum(end - start for start, end, name in labelled if name == "allreduce")
        assert straggler == pytest.approx(result.parts["straggler"][rank, 0])
        assert dense == pytest.approx(result.parts["exposed_dense"][rank, 0])
