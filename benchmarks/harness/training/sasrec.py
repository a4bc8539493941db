"""SASRec (arXiv 1808.09781) in plain PyTorch, to compare the quality of HSTU with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.training.step_timestamps import TimestampedHSTU
from lightning_freescale.batch.seq_batch import HISTORY, SeqBatch
from lightning_freescale.models.norm import unit_rows


class SASRec(TimestampedHSTU):
    """HSTU with its layers replaced by the blocks of SASRec: softmax attention and a feed-forward network of width ``D``.

    Tables, loss, negatives, evaluation and optimizers are those of HSTU, so a difference comes from the layers. A block has
    ``6 D^2`` weights, a layer of HSTU ``5 D^2``. Histories are padded. Positions are embedded at the input, times are not used.
    """

    def __init__(self, num_items: int, **options: Any) -> None:
        super().__init__(num_items, **options, bias="input")
        h = self.hparams
        dim, heads, layers = h["embedding_dim"], h["num_heads"], h["num_layers"]
        assert self.event_encoding is not None
        self.event_encoding.time_gap = None
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, dim, h["dropout"], batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.last_norm = nn.LayerNorm(dim)

    def encode(self, embedded: Mapping[str, Any], batch: SeqBatch) -> Tensor:
        """Output at every event, ``[sum(L), D]``, of length 1."""
        lengths = batch.lengths.long()
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
        assert self.event_encoding is not None
        x = self.input_dropout(
            self.event_encoding(embedded[HISTORY].values() * self.input_scale, offsets, batch.timestamps),
            self.dropout_keys(batch),
        )
        padded = nn.utils.rnn.pad_sequence(list(x.split(lengths.tolist())), batch_first=True)  # [B, longest, D]
        longest = padded.shape[1]
        causal = torch.ones(longest, longest, dtype=torch.bool, device=x.device).triu(1)
        for block in self.layers:
            # Padding is on the right, so the causal mask already hides it from all events.
            padded = block(padded, src_mask=causal)
        used = torch.arange(longest, device=x.device) < lengths[:, None]
        return unit_rows(self.last_norm(padded[used]))
