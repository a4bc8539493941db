"""Figures of a recorded run: its bubble by step and by rank, its metrics, and advice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_freescale.bubbles.advice import Advice, advise
from lightning_freescale.bubbles.attribution import Bubbles, account, attribute
from lightning_freescale.bubbles.records import RecordedRun, add_histograms
from lightning_freescale.bubbles.spans import Kind
from lightning_freescale.bubbles.summary import Summary


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
