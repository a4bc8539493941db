"""What a run's records say: its bubble over time, by rank, and what would help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lightning_freescale.bubbles.attribution import PARTS, Bubbles, account, attribute
from lightning_freescale.bubbles.records import Run, add_histograms
from lightning_freescale.bubbles.summary import Summary
from lightning_freescale.bubbles.timeline import Kind

WORTH_SAYING = 0.03  # share of the step below which a part is not worth advice
EVEN = 1.05  # imbalance below which the ranks count as balanced
ALWAYS = 0.8  # share of the steps from which on one rank is called the straggler


class Advice(NamedTuple):
    """A sentence, and the step time in ms that following it could give at best (``nan`` where that is not known)."""

    text: str
    predicted_ms: float


@dataclass(frozen=True)
class Analysis:
    """Figures of one run. Arrays ``[ranks, steps]`` in seconds are in ``bubbles``."""

    run: Run
    indices: list[int]
    bubbles: Bubbles
    summary: dict[str, float]  # by tag
    typical: int  # step with the median time
    worst: int  # step with the longest
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
        """Whether rows were exchanged by priority: what the run did, whatever its settings say."""
        kinds = (Kind.ROW_EXCHANGE_COLLISION, Kind.ROW_EXCHANGE_EXCLUSIVE)
        last = self.run.step(self.indices[-1])
        return any(span.kind in kinds for step in last for span in step.spans)

    def ms(self, part: str) -> float:
        """Mean over ranks and steps of a part, of ``"bubble"``, ``"useful"`` or ``"wall"``."""
        values = self.bubbles.parts.get(part)
        return 1e3 * float((getattr(self.bubbles, part) if values is None else values).mean())

    def histograms(self, name: str) -> list[list[int]]:
        """Histogram of each rank over all recorded steps."""
        return [
            add_histograms([record.get("histograms", {}).get(name, []) for record in records.values()])
            for records in self.run.records
        ]


def analyse(run: Run) -> Analysis:
    """Attribute every recorded step and sum up."""
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
    """What would help, the most first."""
    step, bubble = analysis.ms("wall"), analysis.ms("bubble")
    settings: dict[str, Any] = analysis.run.headers[0].get("settings", {})
    found = []
    for part in PARTS:
        lost = analysis.ms(part)
        if lost >= WORTH_SAYING * step:
            share = f"{lost / bubble:.0%} of the bubble is"
            found.append(_ADVICE[part](analysis, settings, share, step, lost))
    found.sort(key=lambda advice: np.nan_to_num(advice.predicted_ms, nan=np.inf))
    if not found:
        return [Advice(f"The bubble is {bubble / step:.1%} of the step, and no part of it is worth a change.", np.nan)]
    return found


def _predict(step: float, gain: float) -> tuple[str, float]:
    after = max(step - gain, 0.0)
    return f"predicted step {step:.3g} to {after:.3g} ms at best", after


def _straggler(analysis: Analysis, settings: dict[str, Any], share: str, step: float, lost: float) -> Advice:
    text, after = _predict(step, lost)
    bubbles = analysis.bubbles
    # The rank that waits least is the one the others wait for: what does it spend more time on than they do?
    late = bubbles.parts["straggler"].argmin(axis=0)  # [steps]
    spent = {"useful": bubbles.useful, "input_wait": bubbles.parts["input_wait"], "other": bubbles.parts["other"]}
    steps = np.arange(len(late))
    more = {name: float((values[late, steps] - values.mean(axis=0)).mean()) for name, values in spent.items()}
    reason = max(more, key=lambda name: more[name])
    times = np.bincount(late)
    who = f"rank {times.argmax()}" if times.max() > ALWAYS * len(late) else "a rank, not always the same,"
    cost = analysis.summary["balance/cost_imbalance"]
    if reason == "input_wait":
        return Advice(f"{share} straggler wait: the ranks wait for {who} that waits for its loader; {text}.", after)
    if reason == "other":
        return Advice(
            f"{share} straggler wait: the ranks wait for {who} that spends longer outside of the step (logging, "
            f"checkpoints, callbacks); {text}.",
            after,
        )
    if cost < EVEN:
        return Advice(
            f"{share} straggler wait, although the ranks' batches cost the same: they wait for {who} that computes longer "
            f"(the slowest takes {analysis.summary['balance/imbalance']:.2f}x the mean). Look for a slow device, or "
            f"something else that runs beside it; {text}.",
            after,
        )
    if settings.get("balance", "off") == "off":
        return Advice(f"{share} straggler wait: use balance='fixed'; {text}.", after)
    return Advice(
        f"{share} straggler wait in spite of balance={settings['balance']!r}: batches cost {cost:.2f}x the mean on the "
        f"heaviest rank. balance='variable' lets batch sizes differ, larger batches spread single long histories; {text}.",
        after,
    )


def _embedding(analysis: Analysis, settings: dict[str, Any], share: str, step: float, lost: float) -> Advice:
    collisions = analysis.summary["embedding/collision_rate"]
    hideable = min(lost * (1 - collisions), analysis.ms("useful"))
    if not analysis.prioritized and hideable < WORTH_SAYING * step:
        text, after = _predict(step, lost)
        return Advice(
            f"{share} exposed embedding exchange, and {collisions:.0%} of the rows are shared by consecutive batches, which "
            f"prioritizing cannot hide. Fewer bytes (each distinct row once, narrower rows) or a faster link would help; {text}.",
            after,
        )
    if not analysis.prioritized:
        tried = " (prioritize='auto' found no gain when training began)" if settings.get("prioritize") == "auto" else ""
        text, after = _predict(step, hideable)
        return Advice(
            f"{share} exposed embedding exchange, and {1 - collisions:.0%} of the rows are not shared by consecutive "
            f"batches: use prioritize=True{tried}; {text}.",
            after,
        )
    text, after = _predict(step, lost)
    return Advice(
        f"{share} exposed embedding exchange although it is prioritized: {collisions:.0%} of the "
        f"rows collide and must wait, the rest did not fit behind the compute. More compute per row (larger batches, wider "
        f"layers) or a faster link would hide it; {text}.",
        after,
    )


def _dense(analysis: Analysis, settings: dict[str, Any], share: str, step: float, lost: float) -> Advice:
    text, after = _predict(step, lost)
    return Advice(
        f"{share} AllReduce of the dense gradients that backward does not hide: smaller buckets (bucket_cap_mb) start it "
        f"earlier, larger batches give it more to hide behind; {text}.",
        after,
    )


def _input(analysis: Analysis, settings: dict[str, Any], share: str, step: float, lost: float) -> Advice:
    text, after = _predict(step, lost)
    return Advice(
        f"{share} waiting for the next batch: raise num_workers of the loader, or do less in collation; {text}.", after
    )


def _other(analysis: Analysis, settings: dict[str, Any], share: str, step: float, lost: float) -> Advice:
    return Advice(
        f"{share} spent in the training loop itself: callbacks, logging and hooks between the steps. Larger batches make it "
        "count less.",
        np.nan,
    )


_ADVICE = {
    "straggler": _straggler,
    "exposed_embedding": _embedding,
    "exposed_dense": _dense,
    "input_wait": _input,
    "other": _other,
}
