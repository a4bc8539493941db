from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _plain_blas() -> Iterator[None]:
    """On ARM oneDNN starts threads that do not survive a fork: ranks forked by a later test would hang in a matmul."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield
