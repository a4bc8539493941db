"""Batches with random damage: ``check_batch`` accepts exactly those that fit their tables, and names the field of the others."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale import InputError, SeqBatch
from lightning_freescale.batch.checks import check_batch

ROWS = {"history": 8, "shop": 4}
FIELDS = ("history", "shop", "timestamps", "targets", "features")


@st.composite
def batches(draw: st.DrawFn) -> tuple[SeqBatch, bool]:
    """A batch of up to three samples with at most one damage, and whether it is sound."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    total = sum(lengths)
    parts: dict[str, list[int]] = {
        "history": draw(st.lists(st.integers(0, ROWS["history"] - 1), min_size=total, max_size=total)),
        "shop": draw(st.lists(st.integers(0, ROWS["shop"] - 1), min_size=total, max_size=total)),
        "history lengths": list(lengths),
        "shop lengths": list(lengths),
        "timestamps": list(range(total)),
        "targets": [0] * len(lengths),
    }
    damage = draw(st.sampled_from(["none", "value", "length", "drop", "add"]))
    name = draw(st.sampled_from(["history", "shop"]))
    if damage == "value":
        parts[name][draw(st.integers(0, total - 1))] = draw(st.sampled_from([-1, -(2**40), ROWS[name], 2**40]))
    elif damage == "length":
        at = draw(st.integers(0, len(lengths) - 1))
        parts[f"{name} lengths"][at] += draw(st.sampled_from([-9, -1, 1, 1000]))
    elif damage in ("drop", "add"):
        name = draw(st.sampled_from([name, "timestamps", "targets"]))
        parts[name] = parts[name][1:] if damage == "drop" else [*parts[name], 0]
    values = torch.tensor(parts["history"] + parts["shop"])
    features = KeyedJaggedTensor(
        ["history", "shop"], values, lengths=torch.tensor(parts["history lengths"] + parts["shop lengths"])
    )
    batch = SeqBatch(features, torch.tensor(parts["timestamps"]), torch.tensor(parts["targets"]))
    return batch, damage == "none"


def problem_of(batch: Any) -> str | None:
    try:
        check_batch(batch, ROWS)
    except InputError as error:
        return str(error)
    return None


@settings(max_examples=150, deadline=None)
@given(batches())
def test_every_damage_is_named(case: tuple[SeqBatch, bool]) -> None:
    batch, sound = case
    problem = problem_of(batch)
    assert (problem is None) == sound
    assert problem is None or problem.startswith(FIELDS)


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=5
    )
)
def test_other_objects_are_left_to_the_model_or_named(batch: Any) -> None:
    assert (problem_of(batch) or "").startswith("batch: None") == (batch is None)
