"""The scripts of the tests on a virtual cluster: which run at the same time, and what becomes of a failure. No GPU is needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.gpu_cluster import launcher
from benchmarks.harness.gpu_cluster.rank_process import ClusterFailed
from tests.gpu.clusters import ALL_SMS, Call, Clusters, Run, interrupt_on_sigterm, runs_of, turn

ROOT = Path(__file__).resolve().parents[1]


def test_runs_at_the_same_time_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(ranks: int, argv: list[str], timeout: float, sms: tuple[int, int], env: dict[str, str]) -> list[str]:
        begin = time.monotonic()
        if "fail" in argv:
            raise ClusterFailed("rank 3 failed", 1)
        (tmp_path / f"started {argv[1:]}").touch()
        while sms != ALL_SMS and len(list(tmp_path.glob("started*"))) < 2:  # until the other one has started, too
            time.sleep(0.01)
        result = {
            "begin": begin,
            "end": time.monotonic(),
            "sms": sms,
            "folder": env["FOLDER"],
            "shared": env.get("SHARED"),
        }
        return [f"imports\nRESULT {json.dumps(result)}\n"]

    monkeypatch.setattr(launcher, "run", run)
    alone, *beside = Run("script.py", alone=True), Run("script.py", ("1",)), Run("script.py", ("2",))
    failing = Run("script.py", ("fail",))
    folder = tmp_path / "clusters"
    folder.mkdir()
    clusters = Clusters([alone, *beside, failing, beside[0]], folder, {"SHARED": "yes"})
    last, first, second = (clusters.result(one) for one in (alone, *beside))
    assert last["begin"] > max(first["end"], second["end"])
    assert last["sms"] == [0, 1]
    assert sorted(one["sms"] for one in (first, second)) == [[0, 2], [1, 2]]  # They share no SM.
    assert [one["shared"] for one in (last, first, second)] == [None, "yes", "yes"]
    assert len({one["folder"] for one in (last, first, second)}) == 3
    with pytest.raises(AssertionError, match="rank 3 failed"):
        clusters.result(failing)
    assert [line.split(": ")[1] for line in clusters.describe()[2:]] == ["script", "script-fail"]
    assert clusters.describe()[3] == "failed: script-fail"
    assert sorted(line.split(": ")[1] for line in clusters.describe()[:2]) == ["script-1", "script-2"]
    clusters.close()


def test_what_runs_is_named_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> list[str]:
        (tmp_path / "started").touch()
        try:
            time.sleep(60)
        finally:
            (tmp_path / "ended").touch()
        return ["RESULT 1"]

    monkeypatch.setattr(launcher, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    try:
        interrupt_on_sigterm()
        clusters = Clusters([Run("script.py", ("stuck",))], tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    (line,) = clusters.describe()
    assert line.startswith("not ended after 0 s: ")
    assert line.endswith("script-stuck")
    clusters.close()
    assert (tmp_path / "ended").exists()


def test_processes_without_work_end_without_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        interrupt_on_sigterm()
        early = Call(divmod, (7, 2))
        clusters = Clusters([early], tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert clusters.result(early) == (3, 1)
    clusters.close()
    assert not active_children()
    assert capfd.readouterr().err == ""


def test_sigterm_ends_a_session_like_ctrl_c() -> None:
    program = (
        "import os, signal; from tests.gpu.clusters import interrupt_on_sigterm as i; i(); os.kill(os.getpid(), 15)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "KeyboardInterrupt" in done.stderr


INTERRUPTED = """
import os
import signal

import pytest

from tests.gpu.clusters import interrupt_on_sigterm, may_be_interrupted


@pytest.fixture
def stuck(request):
    interrupt_on_sigterm()
    if PREPARED:
        may_be_interrupted(request.node)
    os.kill(os.getpid(), signal.SIGTERM)


def test_before():
    pass


def test_stuck(tmp_path, stuck):
    pass
"""


@pytest.mark.parametrize("prepared", [True, False])
def test_a_session_that_is_ended_in_a_set_up_has_a_summary(prepared: bool, tmp_path: Path) -> None:
    """Without the call before the wait, pytest ends with a KeyError and says nothing of the tests."""
    (tmp_path / "test_it.py").write_text(INTERRUPTED.replace("PREPARED", str(prepared)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ("1 passed in " in done.stdout) == prepared, done.stdout + done.stderr
    assert ("KeyError" in done.stderr) != prepared


def test_a_call_runs_in_another_process(tmp_path: Path) -> None:
    early, alone = Call(os.getpid), Call(divmod, (7, 2), alone=True)
    clusters = Clusters([early, alone], tmp_path)
    assert clusters.result(early) != os.getpid()
    assert clusters.result(alone) == (3, 1)
    clusters.close()


def test_order_of_the_tests(request: pytest.FixtureRequest) -> None:
    """Tests that wait for a run come after the others, and those that need the whole GPU last."""

    class Item:
        def __init__(self, name: str, *keywords: str, run: Run | Call | None = None):
            self.name, self.keywords = name, keywords
            if run is not None:
                self.callspec = SimpleNamespace(params={"results": run})

    run, alone, call = Run("script.py"), Run("script.py", alone=True), Call(os.getpid)
    items = [
        Item("measures", "gpu", "alone", run=alone),
        Item("waits", "gpu", run=run),
        Item("waits for a call", "gpu", run=call),
        Item("kills", "gpu", "alone"),
        Item("computes", "gpu"),
        request.node,
    ]
    assert runs_of(items) == [alone, run, call]
    assert [item.name for item in sorted(items, key=turn)] == [
        "computes",
        request.node.name,
        "waits",
        "waits for a call",
        "measures",
        "kills",
    ]
