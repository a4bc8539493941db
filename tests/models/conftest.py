"""Settings of all tests of the models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _plain_blas() -> Iterator[None]:
    """Turn oneDNN off. On ARM it starts threads that do not survive a fork, and the ranks that a later test forks would hang."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield
