"""Figures of a recorded run: its bubble over time and by rank, and advice on what would make it faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lightning_freescale.bubbles.attribution import PARTS, Bubbles, account, attribute
from lightning_freescale.bubbles.records import RecordedRun, add_histograms
from lightning_freescale.bubbles.spans import Kind
from lightning_freescale.bubbles.summary import Summary

MIN_SHARE = 0.03  # of the step: smaller parts of the bubble get no advice
BALANCED_BELOW = 1.05  # imbalance below which the ranks count as balanced
SAME_RANK = 0.8  # if one rank is the slowest in more than this share of the steps, the advice names it


class Advice(NamedTuple):
    """A text for the user, and the best step time in ms that following it could give (``nan`` if that is not known)."""

    text: str
    predicted_ms: float


@dataclass(frozen=True)
class Analysis:
    """Figures of one run. ``bubbles`` has them by rank and step, in seconds."""

    run: RecordedRun
    indices: list[int]
    bubbles: Bubbles
    summary: dict[str, float]  # by tag
    typical: int  # index of the step with the median time
    worst: int  # index of the slowest step
    advice: list[Advice]

    @property
    def name(self) -> str:
        return str(self.run.path)

    @property
    def title(self) -> str:
        header = self.run.headers[0]
        settings = ", ".join(f"{key}={value!r}" for key, value in header.get("settings", {}).items())
        return (
            f"{header.get('strategy', 'unknown strategy')}({settings}), {self.run.ranks} ranks on "
            f"{header.get('device', 'unknown device')}, {len(self.indices)} steps recorded "
            f"({self.indices[0]} to {self.indices[-1]})"
        )

    @property
    def prioritized(self) -> bool:
        """Whether the exchange was prioritized in the last step. The setting may be ``"auto"``, so this looks at the spans."""
        kinds = (Kind.ROW_EXCHANGE_COLLISION, Kind.ROW_EXCHANGE_EXCLUSIVE)
        last = self.run.step(self.indices[-1])
        return any(span.kind in kinds for step in last for span in step.spans)

    def ms(self, part: str) -> float:
        """Mean over ranks and steps, in ms, of a part of the bubble, or of ``"bubble"``, ``"useful"`` or ``"wall"``."""
        values = self.bubbles.parts.get(part)
        return 1e3 * float((getattr(self.bubbles, part) if values is None else values).mean())

    def histograms(self, name: str) -> list[list[int]]:
        """A histogram per rank over all recorded steps; ``name`` is ``"lengths"`` or ``"costs"``."""
        return [
            add_histograms([record.get("histograms", {}).get(name, []) for record in records.values()])
            for records in self.run.records
        ]


def analyse(run: RecordedRun) -> Analysis:
    """Compute the figures of a run."""
    indices = run.indices
    steps = [run.step(index) for index in indices]
    bubbles = attribute(np.stack([[account(step[rank]) for step in steps] for rank in range(run.ranks)]))
    order = np.argsort(bubbles.wall.max(axis=0), kind="stable")
    flops = bool(bubbles.counts["flops"].any())
    summary = Summary(flops)(bubbles)
    analysis = Analysis(
        run, indices, bubbles, summary, indices[order[(len(order) - 1) // 2]], indices[order[-1]], advice=[]
    )
    analysis.advice.extend(advise(analysis))
    return analysis


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
    found.sort(key=lambda advice: np.nan_to_num(advice.predicted_ms, nan=np.inf))
    if not found:
        return [
            Advice(
                f"The bubble is {bubble / step:.1%} of the step. No part of it is large enough to be worth a change.",
                np.nan,
            )
        ]
    return found


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
    "exposed_dense": _dense,
    "input_wait": _input,
    "other": _other,
}
