"""``make test-versions``: which sets it tests, and that it never calls a set passed that was not tested."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.harness.tables import versions_block
from lightning_freescale.runtime.requirements import FBGEMM_FOR_TORCH
from tests import versions

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_sets_have_every_supported_release() -> None:
    torches = {one.torch.rpartition(".")[0]: one.fbgemm for one in versions.SETS}
    assert torches == FBGEMM_FOR_TORCH
    pythons = {text.split("::")[-1].strip() for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)}
    assert {one.python for one in versions.SETS} == pythons
    assert {one.lightning.rpartition(".")[0] for one in versions.SETS} == {"2.5", "2.6"}
    assert {one.torchrec for one in versions.SETS} >= {"1.6.1", "1.7.0", "1.8.0", "1.9.2"}
    assert len({one.name for one in versions.SETS}) == len(versions.SETS)
    assert all((ROOT / path).exists() for path in versions.SHORT_SUITE)


@pytest.mark.parametrize(
    ("status", "output", "result", "tests"),
    [
        (0, "....\n88 passed, 2 skipped in 9.0s\n", "passed", 88),
        (1, "1 failed, 87 passed in 9.0s\n", "failed", 87),
        (2, "1 error in 9.0s\n", "failed", 0),
        (0, "2 skipped in 9.0s\n", "failed", 0),
        (5, "no tests ran in 0.1s\n", "failed", 0),
        (1, "", "failed", 0),
    ],
)
def test_only_a_suite_that_ran_has_passed(status: int, output: str, result: str, tests: int) -> None:
    found = versions.outcome(status, output)
    assert (found["result"], found["tests"]) == (result, tests)


def test_a_set_that_cannot_be_installed_is_not_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "ENVIRONMENTS", tmp_path)
    missing = versions.VersionSet("3.99", "2.14.1", "1.9.0", "1.9.2", "2.6.6")
    row = versions.check(missing, tmp_path)
    assert (row["result"], row["reason"]) == ("not run here", "no Python 3.99")
    block = versions_block.block({"versions_cpu": {"sets": [row], "command": "c", "machine": "m"}})
    assert "| 2.14 | 1.9.0 | 1.9.2 | 2.6.6 | 3.99 | 2.14.1 | not run here: no Python 3.99 |" in block
    assert "passed" not in block


def test_a_set_whose_tests_fail_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real suite runner, on a file with a test that fails, in the environment of this test."""
    (tmp_path / "test_bad.py").write_text("def test_bad():\n    assert False\n")
    monkeypatch.setattr(versions, "SHORT_SUITE", (str(tmp_path / "test_bad.py"),))
    monkeypatch.setattr(versions, "install", lambda chosen: Path(sys.executable))
    monkeypatch.setattr(versions, "build", lambda python: None)
    monkeypatch.setattr(versions, "installed_versions", lambda python: {})
    row = versions.check(versions.SETS[0], tmp_path)
    assert (row["result"], row["tests"]) == ("failed", 0)
    assert "1 failed" in (tmp_path / f"{versions.SETS[0].name}.log").read_text()
