"""Torchmetrics of bubbles, balance, communication and throughput: every rank updates them, ``compute()`` covers all ranks.

Times are in seconds.

    straggler = BubbleShare()
    straggler.update(part=0.012, wall=0.1)   # this rank, this step
    straggler.compute()                      # share of the time of all ranks: tensor(0.12)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class _Ratio(Metric):
    """``sum(part) / sum(whole)`` over updates and ranks; ``empty`` if the whole is 0."""

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
    """Share of the ranks' time that is bubble, or that is one part of the bubble (``straggler``, ``input_wait``, ...)."""

    def update(self, part: Any, wall: Any) -> None:
        """Args:
        part: seconds of the bubble, or of one of its parts; a number or an array.
        wall: seconds of the same steps.
        """
        self._add(part, wall)


class OverlapEfficiency(_Ratio):
    """Share of the communication that ran during useful work; 1 if there was no communication."""

    empty = 1.0

    def update(self, hidden: Any, exposed: Any) -> None:
        """Seconds of communication during useful work, and seconds in which the engine waited for communication."""
        self._add(hidden, self._total(hidden) + self._total(exposed))


class PaddingSparsity(_Ratio):
    """Share of padding that batches would have if each were padded to its longest history."""

    def update(self, tokens: Any, padded: Any) -> None:
        """Events of each batch, and its size times its longest history."""
        self._add(self._total(padded) - self._total(tokens), padded)

    def update_lengths(self, lengths: Tensor) -> None:
        """The same, from the history lengths ``[B]`` of one batch."""
        self.update(lengths.sum(), lengths.numel() * lengths.max() if lengths.numel() else 0)


class CollisionRate(_Ratio):
    """Share of the rows of a batch that the previous batch has updated."""

    def update(self, collisions: Any, rows: Any) -> None:
        self._add(collisions, rows)


class IdShare(_Ratio):
    """Share of distinct ids, or of rows, in tables with zero-collision ids."""

    def update(self, part: Any, whole: Any) -> None:
        self._add(part, whole)


class IdsPerStep(_Ratio):
    """Ids in a step of all ranks together, mean over steps."""

    def update(self, ids: Any, steps: int = 1) -> None:
        self._add(ids, steps)


class BytesExchanged(_Ratio):
    """Bytes that a rank sends in a step, mean over ranks and steps."""

    def update(self, nbytes: Any, steps: int = 1) -> None:
        self._add(nbytes, steps)


class StepTime(_Ratio):
    """Wall time of a step in milliseconds, mean over ranks and steps."""

    def update(self, wall: Any, steps: int = 1) -> None:
        self._add(1e3 * self._total(wall), steps)


class Rate(Metric):
    """Amount per second of all ranks together: samples, tokens or FLOPs. The ranks run at the same time: their times do not add.

    ``Rate(peak=...)`` gives the share of ``peak * ranks`` instead. With FLOPs and the peak of a device, this is the MFU.
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
        amount: in this rank's steps, or in the steps of ``ranks`` ranks together.
        seconds: wall time of the steps of one rank.
        ranks: number of ranks that ``amount`` covers.
        """
        self.amount += _total(amount, self.device)
        self.seconds += _total(seconds, self.device)
        self.ranks = torch.full_like(self.ranks, ranks)

    def compute(self) -> Tensor:
        rate = torch.where(self.seconds > 0, self.amount / self.seconds.clamp(min=1e-300), 0.0)
        return (rate if self.peak is None else rate / (self.peak * self.ranks)).to(torch.float32)


class Imbalance(Metric):
    """Largest over mean load of the ranks (cost or compute time), mean over steps; 1 means perfect balance.

    Every rank updates it once per step with its own load. Or one process knows all loads and updates it with ``[ranks]`` or
    ``[steps, ranks]`` loads.
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
        """After a sync, the loads ``[ranks * steps, 1]`` are those of all steps of rank 0, then of rank 1, and so on."""
        if not len(self.loads):
            return torch.ones((), device=self.device)
        loads = dim_zero_cat(self.loads)
        if loads.shape[1] == 1:
            loads = loads.reshape(int(self.ranks), -1).T
        mean = loads.mean(dim=1)
        return torch.where(mean > 0, loads.amax(dim=1) / mean.clamp(min=1e-300), 1.0).mean().to(torch.float32)


def _total(value: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device).sum()
