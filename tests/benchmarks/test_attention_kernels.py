"""The mask of the flex attention with which the attention of HSTU is compared."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.harness.attention_kernels import block_mask


@pytest.mark.parametrize("lengths", [[300, 5, 100, 107], [128, 128, 256], [1, 700, 39], [640]])
def test_blocks_are_those_of_pytorch(lengths: list[int]) -> None:
    total = sum(lengths)
    made = block_mask(lengths, "cpu")
    expected = create_block_mask(made.mask_mod, 1, 1, total, total, device="cpu")
    assert torch.equal(made.to_dense(), expected.to_dense())
    for got, want in (
        (made.kv_num_blocks, expected.kv_num_blocks),
        (made.full_kv_num_blocks, expected.full_kv_num_blocks),
    ):
        assert torch.equal(got, want)
    other = block_mask([total], "cpu")  # negative control: without the borders between histories
    assert len(lengths) == 1 or not torch.equal(other.full_kv_num_blocks, expected.full_kv_num_blocks)
