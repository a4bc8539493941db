"""The transport on a GPU. gpu_ranks.py lists the checks. Every rank is a new process."""

from __future__ import annotations

import pytest

from tests.transport import gpu_cluster


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4])
def test_all_scenarios(world: int) -> None:
    assert gpu_cluster.run(world, exchanges=2_000)[0] == []


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_all_scenarios_with_buffers_in_gpu_memory() -> None:
    assert gpu_cluster.run(4, exchanges=2_000, engine="ipc")[0] == []


@pytest.mark.gpu
@pytest.mark.timeout(200)
def test_the_profiler_records_only_copies() -> None:
    assert (
        gpu_cluster.run(1, ["profile"])[0] == []
    )  # one rank runs without MPS, with which the profiler may record nothing
