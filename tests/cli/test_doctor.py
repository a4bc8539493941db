"""``freescale doctor`` on this machine, and the table of ``transport="auto"`` in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_freescale.cli import doctor
from lightning_freescale.cli import main as cli
from lightning_freescale.transport.choice_table import choice_rows, choice_table
from tests.ranks import run_ranks

OPTIONS = Path(__file__).resolve().parents[2] / "docs" / "options.md"


def _inspect(rank: int) -> list[doctor.Finding]:
    return doctor.inspect()


def test_the_doctor_finds_what_is_installed() -> None:
    (findings,) = run_ranks(
        _inspect, 1
    )  # in a process of its own, because it looks for a driver and remembers the result
    found = {finding.name: finding for finding in findings}
    assert found["torch"].value == torch.__version__
    assert found["torch"].fix == found["FBGEMM"].fix == found["torchrec"].fix == ""
    assert found["shared memory"].value.endswith("MiB free in /dev/shm")
    if not torch.cuda.is_available():
        assert found["transport='auto', one host"].value.startswith("gloo: ")


def _advice(rank: int) -> dict[str, str]:
    import os

    os.environ["FREESCALE_SECRET"] = "short"
    doctor.ENOUGH_SHARED_MEMORY = 1 << 60
    return {finding.name: finding.fix for finding in doctor.inspect() if finding.fix}


def test_the_doctor_says_what_to_fix() -> None:
    (fixes,) = run_ranks(_advice, 1)
    assert "docker run --shm-size=2g" in fixes["shared memory"]
    assert "FREESCALE_SECRET has 5 characters" in fixes["FREESCALE_SECRET"]


def test_the_command_prints_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    finding = doctor.Finding("open files", "at most 64", "ulimit -n 1024")
    monkeypatch.setattr(doctor, "inspect", lambda: [finding])  # what it finds is tested above
    assert cli.main(["doctor", "--table"]) == 1
    printed = capsys.readouterr().out
    assert "open files: ulimit -n 1024" in printed
    assert all(row[6] in printed for row in choice_rows())


def test_the_documentation_has_the_table_of_the_code() -> None:
    assert choice_table() in OPTIONS.read_text()
    assert len(choice_rows()) == len({row[:5] for row in choice_rows()}), "no situation may have two choices"
