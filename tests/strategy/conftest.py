"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks


@pytest.fixture(scope="module", params=["file", "sharded"])
def full_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """The checkpoints of an uninterrupted run in either format, and what each rank trained."""
    from tests.strategy.test_checkpoint import fit

    folder = tmp_path_factory.mktemp(request.param)
    return folder, run_ranks(fit, args=(2, str(folder), None, None, {"checkpoint": request.param}))
