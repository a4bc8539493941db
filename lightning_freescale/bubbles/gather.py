"""The recorded steps of a logging interval on their way to all ranks: one collective, which nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_freescale.bubbles.attribution import WIDTH, account
from lightning_freescale.bubbles.timeline import ENGINE, Kind, Role, Span, Step

PICTURED = 128  # spans per rank in a picture; the longest are kept
_BACKGROUND = "background"
_KINDS = list(Kind)


class Gathering:
    """Accounts of ``steps`` from all ranks, and the spans of the last of them if it is to be drawn.

    Every rank posts the same steps in the same order; the sizes then agree without asking.

    Args:
        step: under which the figures are logged.
        steps: of this rank, at least one.
        offset: of this rank's clock, seconds.
        group: gloo; ``None`` if there is one rank.
        pictured: whether the spans of the last step travel too.
    """

    def __init__(
        self, step: int, steps: Sequence[Step], offset: float, group: dist.ProcessGroup | None, pictured: bool = False
    ):
        self.step, self.steps, self.pictured = step, list(steps), pictured
        rows = [account(one, offset) for one in self.steps]
        if pictured:
            rows.append(_pack(self.steps[-1], offset))
        self._mine = torch.from_numpy(np.concatenate(rows))  # alive until the transfer is done
        self._received, self._work = [self._mine], None
        if group is not None:
            self._received = [torch.empty_like(self._mine) for _ in range(group.size())]
            self._work = dist.all_gather(self._received, self._mine, group=group, async_op=True)

    def ready(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> tuple[NDArray[np.float64], list[Step]]:
        """``[ranks, steps, WIDTH]`` accounts, and the pictured step of each rank (none if there is none)."""
        if self._work is not None:
            self._work.wait()
        size = len(self.steps) * WIDTH
        accounts = np.stack([part[:size].numpy().reshape(-1, WIDTH) for part in self._received])
        if not self.pictured:
            return accounts, []
        return accounts, [_unpack(self.step, part[size:]) for part in self._received]


def _pack(step: Step, offset: float) -> NDArray[np.float64]:
    """A step as ``2 + 5 * PICTURED`` numbers on the common clock."""
    shown = [span for span in step.spans if span.track == ENGINE or span.kind.role is Role.COMMUNICATION]
    shown = sorted(shown, key=lambda span: span.start - span.end)[:PICTURED]
    spans = np.full((PICTURED, 5), np.nan)
    for row, span in zip(spans, shown, strict=False):
        times = np.array([span.start, span.end, span.arrived]) + offset
        row[:] = (_KINDS.index(span.kind), span.track == ENGINE, *times)
    return np.concatenate([np.array([step.start + offset, step.end + offset]), spans.ravel()])


def _unpack(index: int, packed: Tensor) -> Step:
    numbers: Any = packed.numpy()
    spans = numbers[2:].reshape(PICTURED, 5)
    return Step(
        index,
        float(numbers[0]),
        float(numbers[1]),
        tuple(
            Span(_KINDS[int(kind)], ENGINE if engine else _BACKGROUND, float(start), float(end), float(arrived))
            for kind, engine, start, end, arrived in spans[~np.isnan(spans[:, 0])]
        ),
    )
