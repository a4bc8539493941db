"""Tests that run in other processes: their results are those of the session that started them. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.gpu import workers
from tests.gpu.workers import divide, part_of

CONFTEST = """
from pathlib import Path

import pytest

from workers_under_test import Workers, register_reporter

STARTED = []


def pytest_configure(config):
    config.is_worker = register_reporter(config)


def pytest_collection_finish(session):
    if not session.config.is_worker:
        items = [item for item in session.items if item.name != "test_here"]
        STARTED.append(Workers(items, session.config, Path("FOLDER"), processes=2))
        session.config.add_cleanup(STARTED[0].close)


def pytest_runtest_protocol(item):
    return STARTED[0].run(item) or None if STARTED else None
"""
FIRST = """
import os
import signal
import time

import pytest


def test_here():
    assert os.getpid() == int(os.environ["FIRST_SESSION"])


def test_elsewhere(request):
    assert os.getpid() != int(os.environ["FIRST_SESSION"])


@pytest.mark.parametrize("name", ["a b", "c"])
def test_values(name):
    assert name == "c", "the value is wrong"


def test_left_out():
    pytest.skip("not today")


def test_stuck():  # No signal ends it, as in a wait for a kernel that never ends.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)
"""
SECOND = """
import os
import time

import pytest


@pytest.mark.timeout(30)
def test_longer_than_the_limit_of_others():
    time.sleep(2.5)


def test_killed():
    os.kill(os.getpid(), 9)


def test_after():
    pass
"""


def session(folder: Path) -> str:
    """What a session with the two files prints."""
    (folder / "files").mkdir()
    (folder / "tests" / "a" / "b").mkdir(parents=True)
    (folder / "workers_under_test.py").symlink_to(Path(workers.__file__))
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 2\n")
    (folder / "tests" / "conftest.py").write_text(CONFTEST.replace("FOLDER", str(folder / "files")))
    (folder / "tests" / "a" / "test_first.py").write_text(FIRST)
    (folder / "tests" / "a" / "b" / "test_second.py").write_text(SECOND)
    start = (
        "import os, sys, pytest; os.environ['FIRST_SESSION'] = str(os.getpid()); sys.exit(pytest.main(sys.argv[1:]))"
    )
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "pytest_timeout",
    }
    command = [sys.executable, "-c", start, "-v"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    return ended.stdout + ended.stderr


def test_results_of_other_processes(tmp_path: Path) -> None:
    output = session(tmp_path)
    first, second = "tests/a/test_first.py::", "tests/a/b/test_second.py::"
    for name, outcome in {
        f"{first}test_here": "PASSED",
        f"{first}test_elsewhere": "PASSED",
        f"{first}test_values[a b]": "FAILED",
        f"{first}test_values[c]": "PASSED",
        f"{first}test_left_out": "SKIPPED",
        f"{first}test_stuck": "FAILED",
        f"{second}test_longer_than_the_limit_of_others": "PASSED",
        f"{second}test_killed": "FAILED",
        f"{second}test_after": "FAILED",  # it has not run
    }.items():
        assert any(line.startswith(f"{name} {outcome}") for line in output.splitlines()), output
    assert "the value is wrong" in output
    assert "the process of this test has ended: -9" in output
    assert "in test_stuck" in output  # the stack of the thread that is stuck
    assert "4 failed, 4 passed, 1 skipped" in output


def test_parts() -> None:
    tests = Path("/x/tests")
    assert part_of(tests / "test_a.py", tests) == "/x/tests/test_a.py"
    assert part_of(tests / "models" / "test_a.py", tests) == "/x/tests/models/test_a.py"
    assert part_of(tests / "models" / "hopper" / "test_a.py", tests) == "/x/tests/models/hopper"
    weights = {"a": 9, "b": 4, "c": 4, "d": 2}
    for parts in (1, 2, 3, 9):
        divided = divide(weights, parts)
        assert sorted(name for names in divided for name in names) == sorted(weights)
        assert len(divided) == min(parts, 4)
        assert all(divided)
