"""Fixtures of the tests of what a Lightning user expects."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from tests.contract.checkpoints import save_both
from tests.ranks import run_ranks


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """``file.ckpt`` and ``sharded.ckpt`` of the same training on two ranks, and its weights."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(save_both, args=(str(folder),))[0]
