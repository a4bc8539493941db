"""The scripts of the tests on a virtual cluster: which run at the same time, and what becomes of a failure. No GPU is needed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.gpu_cluster.rank_process import ClusterFailed
from tests.gpu.clusters import Clusters, Run


def test_runs_at_the_same_time_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(ranks: int, argv: list[str], timeout: float, reserve_sms: bool, env: dict[str, str]) -> list[str]:
        begin = time.monotonic()
        if "fail" in argv:
            raise ClusterFailed("rank 3 failed", 1)
        time.sleep(0.3)
        result = {"begin": begin, "end": time.monotonic(), "reserve_sms": reserve_sms, "folder": env["FOLDER"]}
        return [f"imports\nRESULT {json.dumps(result)}\n"]

    monkeypatch.setattr(launcher, "run", run)
    alone, *beside = Run("script.py", alone=True), Run("script.py", ("1",)), Run("script.py", ("2",))
    failing = Run("script.py", ("fail",))
    clusters = Clusters([alone, *beside, failing, beside[0]], tmp_path)
    last, first, second = (clusters.result(one) for one in (alone, *beside))
    assert max(first["begin"], second["begin"]) < min(first["end"], second["end"])
    assert last["begin"] > max(first["end"], second["end"])
    assert [one["reserve_sms"] for one in (last, first, second)] == [True, False, False]
    assert len({one["folder"] for one in (last, first, second)}) == 3
    with pytest.raises(AssertionError, match="rank 3 failed"):
        clusters.result(failing)
    clusters.close()
