"""The transport on a GPU: see gpu_ranks.py for what is checked. Every rank is a fresh process."""

from __future__ import annotations

import pytest

from tests.transport import gpu_cluster


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4])
def test_all_scenarios(world: int) -> None:
    assert gpu_cluster.run(world, gpu_cluster.SCENARIOS, exchanges=2_000)[0] == []


@pytest.mark.gpu
@pytest.mark.timeout(200)
def test_profiler_sees_copies_alone() -> None:
    assert gpu_cluster.run(1, ["profile"])[0] == []  # without MPS, under which the profiler may see nothing
