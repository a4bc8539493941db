"""``freescale doctor`` on this machine, and the table of ``transport="auto"`` in the documentation."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from lightning_freescale.cli import doctor
from lightning_freescale.cli import main as cli
from lightning_freescale.runtime.requirements import FBGEMM_FOR_TORCH
from lightning_freescale.transport.choice import Capabilities
from lightning_freescale.transport.choice_table import WORDS, choice_rows, choice_table
from lightning_freescale.transport.engine_timing import EngineTime, engines, time_engines
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
    packages = ("Python", "torch", "FBGEMM", "torchrec", "lightning", "training")
    assert [found[name].fix for name in packages] == [""] * 6
    release = ".".join(torch.__version__.split(".")[:2])
    assert found["FBGEMM"].fits == f"{FBGEMM_FOR_TORCH[release]} for torch {release}"
    assert found["training"].value == "can start"
    assert found["shared memory"].value.endswith("MiB free in /dev/shm")
    if not torch.cuda.is_available():
        assert found["transport='auto', one host"].value.startswith("gloo: ")


def _without_torchrec(rank: int) -> dict[str, doctor.Finding]:
    doctor.TORCHREC_PROBLEM = "it needs TorchRec. Run: pip install --no-deps torchrec"
    installed = {"fbgemm-gpu-cpu": "1.2.0", "lightning": "2.4.9"}
    doctor._version = installed.get
    return {finding.name: finding for finding in doctor.inspect()}


def test_the_doctor_names_what_does_not_fit() -> None:
    (found,) = run_ranks(_without_torchrec, 1)
    release = ".".join(torch.__version__.split(".")[:2])
    package = "fbgemm-gpu" if torch.cuda.is_available() else "fbgemm-gpu-cpu"
    assert found["FBGEMM"].fix == f"pip install {package}=={FBGEMM_FOR_TORCH[release]}"
    assert (found["torchrec"].value, found["torchrec"].fix) == ("missing", "pip install --no-deps torchrec")
    assert (found["lightning"].value, found["lightning"].fix) == ("2.4.9", "pip install lightning")
    assert "pip install --no-deps torchrec" in found["training"].fix
    assert found["Python"].fix == ""


@pytest.mark.parametrize(
    ("driver", "devices", "built", "works", "words"),
    [
        ("13.0", 8, "13.0", True, ""),
        (None, 0, None, False, ""),
        (None, 0, "13.0", False, ""),
        ("13.0", 2, None, False, "this machine has 2 GPUs, but torch is built without CUDA"),
        ("12.8", 1, "13.0", False, "the driver is too old for CUDA 13.0: update it, or install a torch for CUDA 12"),
        ("13.0", 1, "12.8", False, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_advice_about_the_driver(driver: str | None, devices: int, built: str | None, works: bool, words: str) -> None:
    found = Capabilities(False, "", driver, devices, 0, "", False)
    advice = doctor.driver_advice(found, built, works)
    assert words in advice
    assert bool(words) == bool(advice)


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
    assert all(row[-1] in printed for row in choice_rows())


def test_the_documentation_has_the_table_of_the_code() -> None:
    assert choice_table() in OPTIONS.read_text()
    situations = [row[1:-2] for row in choice_rows() if row[0] == "CUDA"]
    exact = {values for row in situations for values in product(*map(_meanings, row, WORDS.values()))}
    covered = sum(2 ** row.count("any") for row in situations)
    assert covered == len(exact) == 2 ** len(WORDS), "every situation must have one choice"


def _meanings(word: str, both: tuple[str, str]) -> tuple[str, ...]:
    return both if word == "any" else (word,)


def test_the_command_times_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without CUDA")
    times = time_engines("cpu", 2, mebibytes=1, repeats=2)
    assert [time.engine for time in times] == [engine.name for engine in engines("cpu")]
    assert all(time.problem or (time.gb_per_second and time.microseconds) for time in times)
    assert not times[0].problem, "gloo runs everywhere"
    lines = doctor.timing_lines([*times, EngineTime("pigeons", problem="no bread")])
    assert "GB/s" in lines[0]
    assert lines[-1].endswith("cannot run: no bread")
