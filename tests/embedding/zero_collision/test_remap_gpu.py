"""The compiled Triton kernels of zero-collision ids: equal to the reference and to the C++ core, with many ids at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec import EmbeddingConfig

from lightning_freescale.embedding.zero_collision.fresh_rows import row_draw
from lightning_freescale.embedding.zero_collision.layout import Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("seed", range(40))
def test_compiled_kernels_equal_the_reference(seed: int) -> None:
    from tests.embedding.zero_collision.kernels import compare_with_reference, random_case

    compare_with_reference(**random_case(seed), device=torch.device("cuda"))


@pytest.mark.parametrize("policy", [None, "ttl", "lru"])
@pytest.mark.parametrize("size", [64, 4096])
def test_compiled_kernels_equal_the_core(policy: Any, size: int) -> None:
    from tests.embedding.zero_collision.kernels import compare_with_core

    layout = Layout(buckets=96, first_bucket=16, held=64, bucket_size=size, reserved=size // 32, max_probe=128)
    compare_with_core(policy, torch.device("cuda"), steps=8, batch=60 * size, layout=layout)


@pytest.mark.parametrize("std", [None, 0.02])
def test_first_rows_have_the_same_bits(std: float | None) -> None:
    table = EmbeddingConfig(name="item", embedding_dim=64, num_embeddings=1000, feature_names=["f"])
    draw, ids = row_draw(table, 3, std), torch.randint(0, 2**63 - 1, (4001,))
    assert torch.equal(draw(ids.cuda()).cpu(), draw(ids))
