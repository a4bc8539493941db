"""Gathers the recorded steps of a logging interval from all ranks, with one AllGather in the background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_freescale.bubbles.attribution import WIDTH, account
from lightning_freescale.bubbles.spans import ENGINE, Kind, Role, Span, Step

MAX_DRAWN_SPANS = 128  # per rank in a picture; the longest spans are kept
_BACKGROUND = "background"
_KINDS = list(Kind)


class IntervalGather:
    """An AllGather of the accounts of ``steps``, and of the spans of the last step if it is drawn.

    Every rank gathers the same steps in the same order, so all ranks send messages of the same size.

    Args:
        step: index of the last step of the interval.
        steps: recorded steps of this rank, at least one.
        offset: seconds to add to this rank's clock to get rank 0's time.
        group: a gloo group; ``None`` if there is only one rank.
        with_picture: whether to send the spans of the last step too.
    """

    def __init__(
        self,
        step: int,
        steps: Sequence[Step],
        offset: float,
        group: dist.ProcessGroup | None,
        with_picture: bool = False,
    ):
        self.step, self.steps, self.with_picture = step, list(steps), with_picture
        rows = [account(one, offset) for one in self.steps]
        if with_picture:
            rows.append(_pack(self.steps[-1], offset))
        self._sent = torch.from_numpy(np.concatenate(rows))  # must stay alive until the AllGather is done
        self._received, self._work = [self._sent], None
        if group is not None:
            self._received = [torch.empty_like(self._sent) for _ in range(group.size())]
            self._work = dist.all_gather(self._received, self._sent, group=group, async_op=True)

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> tuple[NDArray[np.float64], list[Step]]:
        """``[ranks, steps, WIDTH]`` accounts, and the step to draw of each rank (an empty list if none is drawn)."""
        if self._work is not None:
            self._work.wait()
        size = len(self.steps) * WIDTH
        accounts = np.stack([part[:size].numpy().reshape(-1, WIDTH) for part in self._received])
        if not self.with_picture:
            return accounts, []
        return accounts, [_unpack(self.step, part[size:]) for part in self._received]


def _pack(step: Step, offset: float) -> NDArray[np.float64]:
    """A step as ``[2 + 5 * MAX_DRAWN_SPANS]`` numbers, on rank 0's clock."""
    shown = [span for span in step.spans if span.track == ENGINE or span.kind.role is Role.COMMUNICATION]
    shown = sorted(shown, key=lambda span: span.start - span.end)[:MAX_DRAWN_SPANS]
    spans = np.full((MAX_DRAWN_SPANS, 5), np.nan)
    for row, span in zip(spans, shown, strict=False):
        times = np.array([span.start, span.end, span.joined]) + offset
        row[:] = (_KINDS.index(span.kind), span.track == ENGINE, *times)
    return np.concatenate([np.array([step.start + offset, step.end + offset]), spans.ravel()])


def _unpack(index: int, packed: Tensor) -> Step:
    """The inverse of :func:`_pack`."""
    numbers: Any = packed.numpy()
    spans = numbers[2:].reshape(MAX_DRAWN_SPANS, 5)
    return Step(
        index,
        float(numbers[0]),
        float(numbers[1]),
        tuple(
            Span(_KINDS[int(kind)], ENGINE if engine else _BACKGROUND, float(start), float(end), float(joined))
            for kind, engine, start, end, joined in spans[~np.isnan(spans[:, 0])]
        ),
    )
