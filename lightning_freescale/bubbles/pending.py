"""A step that is recorded but not resolved: its times may be CUDA events that the device has not reached."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_freescale.bubbles.spans import Kind, Span, Step

Moment = float | torch.cuda.Event  # seconds on the host's clock, or an event on a CUDA stream


class PendingStep:
    """The spans, counts and arrays of one step, with moments in the place of times.

    Args:
        index: of the step.
        start: when it starts.
        clock_sample: on CUDA, an event and the host's time just before it was recorded; see :class:`DeviceClock`.
    """

    def __init__(self, index: int, start: Moment, clock_sample: tuple[torch.cuda.Event, float] | None):
        self.index, self.start, self.clock_sample = index, start, clock_sample
        self.end: Moment = math.nan
        self.spans: list[tuple[Kind, str, Moment, Moment, Moment]] = []
        self.counts: dict[str, float] = {}
        self.device_counts: list[tuple[str, Tensor]] = []  # copies to the host, perhaps not complete yet
        self.kept: dict[str, Tensor] = {}
        self.copied: list[Moment] = []  # when those copies are complete

    def events(self) -> list[torch.cuda.Event]:
        """All CUDA events of this step."""
        if self.clock_sample is None:
            return []
        moments = [self.start, self.end, *self.copied, *(moment for span in self.spans for moment in span[2:])]
        moments.append(self.clock_sample[0])
        return [moment for moment in moments if not isinstance(moment, float)]

    def resolve(self, sampled_at: float) -> Step:
        """The step on the host's clock. All of its events must have happened.

        Args:
            sampled_at: seconds on the host's clock at which the event of the clock sample happened; unused on CPU.
        """

        def seconds(moment: Moment) -> float:
            if isinstance(moment, float):
                return moment
            assert self.clock_sample is not None
            return sampled_at + self.clock_sample[0].elapsed_time(moment) / 1e3

        for name, value in self.device_counts:
            self.counts[name] = self.counts.get(name, 0.0) + float(value)
        arrays = {name: value.numpy() for name, value in self.kept.items()}
        spans = (Span(kind, track, *map(seconds, moments)) for kind, track, *moments in self.spans)
        return Step(self.index, seconds(self.start), seconds(self.end), tuple(spans), self.counts, arrays)
