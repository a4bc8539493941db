"""The time of forward and backward for long histories: full histories, and personal tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.long_history.trial import make_batch
from lightning_freescale.models import HSTU, PersonalTokens
from lightning_freescale.models.hstu_layer import HSTULayer
from lightning_freescale.models.personal_tokens import attention_work
from lightning_freescale.models.sequences import Attention

PAST, RECENT = 1024, 256
ITEMS = 10_000
FULL, BY_PARTS = "full history", "4 tokens, layer by parts"
CUTS: dict[str, PersonalTokens | None] = {
    FULL: None,
    "4 tokens": PersonalTokens(4, RECENT, 64),
    "4 tokens, fixed cut": PersonalTokens(4, RECENT, 64, random_cut=False),
    "4 segments of 4 tokens": PersonalTokens(4, RECENT, 64, segments=4),
    BY_PARTS: PersonalTokens(4, RECENT, 64),
}


def _by_parts(
    layer: HSTULayer, x: Tensor, attention: Attention, keys: Tensor | None = None, *, total: bool = True
) -> Tensor:
    """``HSTULayer.forward`` without the fused kernels."""
    return layer.plain(x, attention, keys)


def step_rows(device: str, quick: bool, rounds: int = 3) -> list[dict[str, Any]]:
    """A row for each variant: milliseconds of a step, and the work of the attention, compared with the full history."""
    chosen = torch.device(device)
    width, layers, users, repeats = (512, 8, 32, 8) if device == "cuda" else (64, 2, 4, 2)
    if quick:
        width, layers, users, repeats = 16, 1, 1, 1
    variants = {name: cut for name, cut in CUTS.items() if name != BY_PARTS or device == "cuda"}
    steps = {name: _step(cut, width, layers, users, chosen) for name, cut in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, step in steps.items():
            kept = HSTULayer.forward
            if name == BY_PARTS:
                HSTULayer.forward = _by_parts  # type: ignore[method-assign, assignment]
            times[name].append(_milliseconds(step, chosen, repeats))
            HSTULayer.forward = kept  # type: ignore[method-assign]
    length = np.array([float(PAST + RECENT)])
    rows = []
    for name, found in times.items():
        ratios = [own / full for own, full in zip(found, times[FULL], strict=True)]
        rows.append(
            {
                "model": f"{layers} layers of {width}, batch of {users}",
                "variant": name,
                "step ms": statistics.median(found),
                "of full": statistics.median(ratios),
                "spread": f"{min(ratios):.3f} to {max(ratios):.3f}",
                "attention work of full": float(attention_work(variants[name])(length)[0] / length[0] ** 2),
            }
        )
    return rows


def _step(cut: PersonalTokens | None, width: int, layers: int, users: int, device: torch.device) -> Callable[[], Any]:
    torch.manual_seed(0)
    chance = np.random.default_rng(0)
    model = HSTU(
        ITEMS,
        embedding_dim=width,
        num_layers=layers,
        num_heads=max(1, width // 128),
        max_history=PAST + RECENT,
        personalization=cut,
    ).to(device)
    histories = [chance.integers(ITEMS, size=PAST + RECENT) for _ in range(users)]
    drawn = torch.from_numpy(chance.integers(ITEMS, size=(users, 128)))
    batch = make_batch(histories, device, drawn=drawn)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model.loss(model.embedding(batch.features), batch)
        model.zero_grad()
        loss.backward()

    return step


def _milliseconds(step: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median time of a step, after one that is not counted."""
    found = []
    for number in range(repeats + 1):
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number:
            found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found)
