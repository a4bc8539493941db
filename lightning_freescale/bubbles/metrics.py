"""Bubbles and what goes with them as torchmetrics: update on every rank, compute for all of them.

States are sums or means over ranks, or lists of one value per step, so a metric means the same on one rank, on many,
and after ``reset()``. Times are in seconds.

    straggler = BubbleShare()
    straggler.update(part=0.012, wall=0.1)   # this rank, this step
    straggler.compute()                      # share of all ranks' time: tensor(0.12)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class _Ratio(Metric):
    """``sum(part) / sum(whole)`` over updates and ranks; ``empty`` where there is nothing to divide by."""

    full_state_update = False
    empty = 0.0
    part: Tensor
    whole: Tensor

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.add_state("part", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("whole", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _total(self, value: Any) -> Tensor:
        return _total(value, self.device)

    def _add(self, part: Any, whole: Any) -> None:
        self.part += self._total(part)
        self.whole += self._total(whole)

    def compute(self) -> Tensor:
        ratio = torch.where(self.whole > 0, self.part / self.whole.clamp(min=1e-300), self.empty)
        return ratio.to(torch.float32)


class BubbleShare(_Ratio):
    """Share of the ranks' time that is bubble, or one part of it (``straggler``, ``input_wait``, ...)."""

    def update(self, part: Any, wall: Any) -> None:
        """Seconds of the bubble or part, and of the steps: numbers or arrays of the same steps."""
        self._add(part, wall)


class OverlapEfficiency(_Ratio):
    """Share of the communication that ran behind useful work; 1 where there was none to hide."""

    empty = 1.0

    def update(self, hidden: Any, exposed: Any) -> None:
        """Seconds of communication behind useful work, and seconds the engine waited for it."""
        self._add(hidden, self._total(hidden) + self._total(exposed))


class PaddingSparsity(_Ratio):
    """Share of padding if every batch were padded to its longest history."""

    def update(self, tokens: Any, padded: Any) -> None:
        """Events of the histories of each batch, and batch size times the longest of them."""
        self._add(self._total(padded) - self._total(tokens), padded)

    def update_lengths(self, lengths: Tensor) -> None:
        """The same from the history lengths ``[B]`` of one batch."""
        self.update(lengths.sum(), lengths.numel() * lengths.max() if lengths.numel() else 0)


class CollisionRate(_Ratio):
    """Share of the rows a batch asks for that the batch before has updated."""

    def update(self, collisions: Any, rows: Any) -> None:
        self._add(collisions, rows)


class BytesExchanged(_Ratio):
    """Bytes a rank hands to collectives in a step, mean over ranks and steps."""

    def update(self, nbytes: Any, steps: int = 1) -> None:
        self._add(nbytes, steps)


class StepTime(_Ratio):
    """Wall time of a step in milliseconds, mean over ranks and steps."""

    def update(self, wall: Any, steps: int = 1) -> None:
        self._add(1e3 * self._total(wall), steps)


class Rate(Metric):
    """Amount per second of all ranks together: samples, tokens or FLOPs. Ranks run side by side, so their times do not add.

    ``Rate(peak=...)`` gives the share of ``peak * ranks`` instead: MFU, with FLOPs as the amount and a device's peak.
    """

    full_state_update = False
    amount: Tensor
    seconds: Tensor
    ranks: Tensor

    def __init__(self, peak: float | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.peak = peak
        self.add_state("amount", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("seconds", torch.zeros((), dtype=torch.float64), dist_reduce_fx="mean")
        self.add_state("ranks", torch.ones((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, amount: Any, seconds: Any, ranks: int = 1) -> None:
        """Args:
        amount: of this rank's steps; or of ``ranks`` ranks together.
        seconds: wall time of one rank's steps.
        ranks: how many ranks ``amount`` is of.
        """
        self.amount += _total(amount, self.device)
        self.seconds += _total(seconds, self.device)
        self.ranks = torch.full_like(self.ranks, ranks)

    def compute(self) -> Tensor:
        rate = torch.where(self.seconds > 0, self.amount / self.seconds.clamp(min=1e-300), 0.0)
        return (rate if self.peak is None else rate / (self.peak * self.ranks)).to(torch.float32)


class Imbalance(Metric):
    """Largest over mean of the ranks' loads (cost, or compute time), mean over steps: 1 is perfectly balanced.

    Every rank updates once a step with its own load; or one that knows them all, with ``[ranks]`` or ``[steps, ranks]`` loads.
    """

    full_state_update = False
    loads: list[Tensor]
    ranks: Tensor

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.add_state("loads", [], dist_reduce_fx="cat")
        self.add_state("ranks", torch.ones((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, load: Any) -> None:
        values = torch.as_tensor(load, dtype=torch.float64, device=self.device)
        self.loads.append(values if values.ndim == 2 else values.reshape(1, -1))

    def compute(self) -> Tensor:
        """Synced, the loads are those of rank 0's steps, then of rank 1's, ...: ``[ranks * steps, 1]``."""
        if not len(self.loads):
            return torch.ones((), device=self.device)
        loads = dim_zero_cat(self.loads)
        if loads.shape[1] == 1:
            loads = loads.reshape(int(self.ranks), -1).T
        mean = loads.mean(dim=1)
        return torch.where(mean > 0, loads.amax(dim=1) / mean.clamp(min=1e-300), 1.0).mean().to(torch.float32)


def _total(value: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device).sum()
