"""The compiled Triton kernels of zero-collision ids against the C++ core, with many ids in flight at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_freescale.embedding.zero_collision.layout import Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("policy", [None, "ttl", "lru"])
@pytest.mark.parametrize("size", [64, 4096])
def test_compiled_kernels_equal_the_core(policy: Any, size: int) -> None:
    from tests.embedding.zero_collision.kernels import compare_with_core

    layout = Layout(buckets=96, first_bucket=16, held=64, bucket_size=size, reserved=size // 32, max_probe=128)
    compare_with_core(policy, torch.device("cuda"), steps=8, batch=60 * size, layout=layout)
