"""Advice to the user of ``freescale report``: what would make a run faster, and by how much at best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_freescale.bubbles.attribution import PARTS

if TYPE_CHECKING:
    from lightning_freescale.bubbles.analysis import Analysis

MIN_SHARE = 0.03  # of the step: smaller parts of the bubble get no advice
BALANCED_BELOW = 1.05  # imbalance below which the ranks count as balanced
MIN_FALLBACK = 0.01  # share of ids without a row of their own from which on there is advice
SAFE_LOAD = 0.75  # load of a zero-collision table at which ids find rows
SAME_RANK = 0.8  # if one rank is the slowest in more than this share of the steps, the advice names it


class Advice(NamedTuple):
    """A text for the user, and the best step time in ms that following it could give (``nan`` if that is not known)."""

    text: str
    predicted_ms: float


def advise(analysis: Analysis) -> list[Advice]:
    """Advice, ordered by the step time it could give, the best first."""
    step, bubble = analysis.ms("wall"), analysis.ms("bubble")
    settings: dict[str, Any] = analysis.run.headers[0].get("settings", {})
    found = []
    for part in PARTS:
        lost = analysis.ms(part)
        if lost >= MIN_SHARE * step:
            share = f"{lost / bubble:.0%} of the bubble is"
            found.append(_ADVICE[part](analysis, settings, share, step, lost))
    found += _missing_rows(analysis)
    found.sort(key=lambda advice: np.nan_to_num(advice.predicted_ms, nan=np.inf))
    if not found:
        return [
            Advice(
                f"The bubble is {bubble / step:.1%} of the step. No part of it is large enough to be worth a change.",
                np.nan,
            )
        ]
    return found


def _missing_rows(analysis: Analysis) -> list[Advice]:
    """Advice on zero-collision tables that are too small for their ids. It does not change the time of a step."""
    fallback, load = (analysis.summary.get(f"ids/{name}", 0.0) for name in ("fallback", "load"))
    if fallback < MIN_FALLBACK:
        return []
    factor = max((load + fallback) / SAFE_LOAD, 1.1)
    return [
        Advice(
            f"{fallback:.0%} of the distinct ids of a batch have no row of their own, at a load of {load:.2f}: enlarge the "
            f"tables with zero-collision ids by {factor:.1f}x, or let obsolete ids lose their rows earlier (evict, ttl).",
            np.nan,
        )
    ]


def _predict(step: float, gain: float) -> tuple[str, float]:
    """A phrase about the step time in ms without ``gain`` ms, and that time."""
    after = max(step - gain, 0.0)
    return f"predicted step time at best: {after:.3g} ms (now {step:.3g} ms)", after


def _straggler(analysis: Analysis, settings: dict[str, Any], share: str, step: float, lost: float) -> Advice:
    text, after = _predict(step, lost)
    bubbles = analysis.bubbles
    # The other ranks wait for the rank that waits least. Find what this rank spends more time on than the mean.
    late = bubbles.parts["straggler"].argmin(axis=0)  # [steps]
    spent = {"useful": bubbles.useful, "input_wait": bubbles.parts["input_wait"], "other": bubbles.parts["other"]}
    steps = np.arange(len(late))
    more = {name: float((values[late, steps] - values.mean(axis=0)).mean()) for name, values in spent.items()}
    reason = max(more, key=lambda name: more[name])
    times = np.bincount(late)
    who = f"rank {times.argmax()}" if times.max() > SAME_RANK * len(late) else "a rank (not always the same one)"
    cost = analysis.summary["balance/cost_imbalance"]
    if reason == "input_wait":
        return Advice(
            f"{share} straggler wait: the ranks wait for {who}, which waits for its DataLoader. Raise num_workers; {text}.",
            after,
        )
    if reason == "other":
        return Advice(
            f"{share} straggler wait: the ranks wait for {who}, which spends more time outside of the step (logging, "
            f"checkpoints, callbacks); {text}.",
            after,
        )
    if cost < BALANCED_BELOW:
        return Advice(
            f"{share} straggler wait, although the batches of all ranks cost the same: the ranks wait for {who}, which "
            f"computes longer (the slowest rank takes {analysis.summary['balance/imbalance']:.2f}x the mean). Look for a "
            f"slow device, or for another process on it; {text}.",
            after,
        )
    if settings.get("balance", "off") == "off":
        return Advice(f"{share} straggler wait: use balance='fixed'; {text}.", after)
    return Advice(
        f"{share} straggler wait although balance={settings['balance']!r}: the batch of the heaviest rank costs {cost:.2f}x "
        f"the mean. Use balance='variable', which allows different batch sizes, or larger batches; {text}.",
        after,
    )


def _embedding(analysis: Analysis, settings: dict[str, Any], share: str, step: float, lost: float) -> Advice:
    collisions = analysis.summary["embedding/collision_rate"]
    hideable = min(lost * (1 - collisions), analysis.ms("useful"))
    if not analysis.prioritized and hideable < MIN_SHARE * step:
        text, after = _predict(step, lost)
        return Advice(
            f"{share} exposed embedding exchange. {collisions:.0%} of the rows are collisions (shared by consecutive batches), "
            f"which prioritizing cannot hide. Send fewer bytes (each distinct row once, narrower rows) or use a faster link; "
            f"{text}.",
            after,
        )
    if not analysis.prioritized:
        tried = " (prioritize='auto' found no gain when training began)" if settings.get("prioritize") == "auto" else ""
        text, after = _predict(step, hideable)
        return Advice(
            f"{share} exposed embedding exchange, and {1 - collisions:.0%} of the rows are exclusive (not shared by "
            f"consecutive batches): use prioritize=True{tried}; {text}.",
            after,
        )
    text, after = _predict(step, lost)
    return Advice(
        f"{share} exposed embedding exchange although it is prioritized: a step always waits for collisions "
        f"({collisions:.0%} of the rows), and for exclusive rows if their exchange takes longer than the compute. Use more "
        f"compute per row (wider or more layers) or a faster link; {text}.",
        after,
    )


def _dense(analysis: Analysis, settings: dict[str, Any], share: str, step: float, lost: float) -> Advice:
    text, after = _predict(step, lost)
    return Advice(
        f"{share} AllReduce of the dense gradients that backward does not hide: use smaller buckets (bucket_cap_mb), which "
        f"start it earlier, or larger batches, which make backward longer; {text}.",
        after,
    )


def _experts(analysis: Analysis, settings: dict[str, Any], share: str, step: float, lost: float) -> Advice:
    text, after = _predict(step, lost)
    return Advice(
        f"{share} exchange of events with the ranks of their experts: turn expert_parallel off, since every rank has the "
        f"weights of all experts; {text}.",
        after,
    )


def _input(analysis: Analysis, settings: dict[str, Any], share: str, step: float, lost: float) -> Advice:
    text, after = _predict(step, lost)
    return Advice(
        f"{share} waiting for the next batch: raise num_workers of the DataLoader, or do less work in collate_fn; {text}.",
        after,
    )


def _other(analysis: Analysis, settings: dict[str, Any], share: str, step: float, lost: float) -> Advice:
    return Advice(
        f"{share} time of the training loop itself: callbacks, logging and hooks between the steps. Use larger batches, which "
        "make it a smaller share.",
        np.nan,
    )


_ADVICE = {
    "straggler": _straggler,
    "exposed_embedding": _embedding,
    "exposed_experts": _experts,
    "exposed_dense": _dense,
    "input_wait": _input,
    "other": _other,
}
