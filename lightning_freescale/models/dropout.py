"""Dropout whose mask is a function of the sample, so it does not depend on the rank or on the place in the batch.

The random numbers come from a hash of what identifies an element: the ids of its sample (its history and its negatives), the
training step, the position, the layer and the channel. There is no generator with a state. So a sample has the same mask
wherever it is balanced to, in any order of the samples, on a CPU and on a GPU, and after a resume.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.models.even_rows import pad_rows
from lightning_freescale.runtime.errors import ConfigurationError

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # odd; the constants of SplitMix64, as signed numbers
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def row_keys(batch: SeqBatch, step: int) -> Tensor:
    """A random number for every event of the batch, ``[sum(L)]`` int32. It depends on the sample, ``step`` and the position.

    Nothing is copied to the host.

    Args:
        batch: a sample is identified by the ids of its history and of its negatives.
        step: number of the training step.
    """
    by_key = batch.by_key
    if batch.timestamps.is_cuda:
        from lightning_freescale.models import dropout_triton  # Triton is installed on CUDA machines only

        parts = [by_key[name] for name in (HISTORY, NEGATIVES) if name in by_key]
        history, *negatives = [(part.values(), part.offsets()) for part in parts]
        return dropout_triton.row_keys(history, negatives[0] if negatives else None, step)
    lengths = batch.lengths.long()
    sample_keys = torch.full_like(lengths, step)
    for name in (HISTORY, NEGATIVES):
        if name in by_key:
            ids = by_key[name]
            sample_keys = _mix(sample_keys * _GOLDEN + _sums(_mix(ids.values().long() * _GOLDEN), ids.lengths()))
    ends = lengths.cumsum(0)
    event = torch.arange(len(batch.timestamps), device=lengths.device)
    sample = torch.searchsorted(ends, event, right=True)
    position = event - (ends - lengths)[sample]
    return _mix(sample_keys[sample] + (position + 1) * _GOLDEN).to(torch.int32)  # the lower 32 bits


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum of each segment of ``values``, modulo 2^64; the segments have ``lengths``."""
    return F.pad(values.cumsum(0), (1, 0))[F.pad(lengths.long().cumsum(0), (1, 0))].diff()


def _mix(x: Tensor) -> Tensor:
    """The output function of SplitMix64 without its last step: every input bit affects the upper half of the output."""
    for shift, factor in _MIX:
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor  # ``>>`` copies the sign, the mask removes it
    return x ^ ((x >> 31) & (2**33 - 1))


class SampleDropout(nn.Module):
    """Dropout with masks from :func:`row_keys`.

    Args:
        rate: share of the elements that become 0. The others are divided by ``1 - rate``.
        number: tells the dropouts of one model apart: their masks must differ.
    """

    def __init__(self, rate: float, number: int = 0) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ConfigurationError(f"dropout: {rate} is not a rate; it must be at least 0 and less than 1")
        self.rate, self.number = rate, number

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None,
        scale: float = 1.0,
        total: int | None = None,
        place: Tensor | None = None,
    ) -> Tensor:
        """``x [N, D]`` times ``scale`` with its dropped elements. Nothing is dropped without training.

        Args:
            x: ``[N, D]``.
            keys: ``[N]`` int32, or longer.
            scale: factor.
            total: number of rows of the result; those after the rows of ``x`` are 0. By default ``N``.
            place: ``[total, D]``, contiguous, may receive the result.
        """
        if not self.training or self.rate == 0:
            return pad_rows(x if scale == 1 else x * scale, total, place)
        assert keys is not None, "keys: None; dropout needs the result of row_keys"
        if not x.is_cuda:
            x = x if scale == 1 else x * scale
            masks = kept(keys[: len(x)], x.shape[1], self.number, self.rate)
            return pad_rows(torch.where(masks, x / (1 - self.rate), 0.0), total)
        from lightning_freescale.models import dropout_triton  # Triton is installed on CUDA machines only

        return dropout_triton.drop(x, keys, self.number, self.rate, scale, total, place)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def threshold(rate: float) -> int:
    """An element is dropped if its random number, a signed 32-bit integer, is below this."""
    return round(rate * 2**32) - 2**31


def kept(keys: Tensor, width: int, number: int, rate: float) -> Tensor:
    """Which elements stay, ``[N, width]`` bool, in PyTorch operations. Arguments as in :class:`SampleDropout`."""
    channels = torch.arange(number << 16, (number << 16) + width, dtype=torch.int32, device=keys.device)
    return _mix_32(keys[:, None] ^ _mix_32(channels + 1)) >= threshold(rate)


def _mix_32(x: Tensor) -> Tensor:
    """A hash of 32-bit integers, in place. Every input bit affects the upper bits, which decide about the mask."""
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    return x
