"""The transport on a GPU. gpu_ranks.py lists the checks. Every rank is a new process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.clusters import Call, started_early
from tests.transport import gpu_cluster

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def scenarios(world: int, engine: str, *names: str) -> tuple[list[str], str]:
    """Which of the scenarios failed, of all by default, and what the ranks printed."""
    return gpu_cluster.run(world, list(names), exchanges=2_000, engine=engine)


# A single rank runs without MPS, with which the profiler may record nothing.
@started_early(
    Call(scenarios, (2, "host")),
    Call(scenarios, (4, "host")),
    Call(scenarios, (4, "ipc")),
    Call(scenarios, (1, "host", "profile")),
)
def test_all_scenarios(results: Any) -> None:
    failed, printed = results
    assert failed == [], printed
