"""The scripts as a whole: the listing, the options that all share, that each starts, and the header of a result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import TOOLS, scripts
from benchmarks.harness import report
from benchmarks.harness.results import load_results
from tests.benchmarks.command import ROOT, fork_script, start_interpreter

# Prints the listing, then which heavy packages it imported.
LIST = """
import runpy, sys
try:
    runpy.run_module("benchmarks", run_name="__main__")
finally:
    print({"torch", "numpy", "lightning_freescale", "matplotlib"} & set(sys.modules), file=sys.stderr)
"""


def test_the_listing_names_all_scripts_and_imports_no_heavy_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIST], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr.strip() == "set()"
    for script in scripts():
        assert f"{script.name}: {script.claim}" in done.stdout


def test_every_benchmark_has_a_description_and_a_command() -> None:
    found = list(scripts())
    assert {"balance", "exposed", "hstu_attention", "simulate", "sm_free", "straggler"} <= {s.name for s in found}
    for script in found:
        assert script.claim.endswith((".", "?"))
        assert script.commands
        assert all(line.startswith("python -m benchmarks") for line in script.commands)


@pytest.mark.parametrize("name", [script.name for script in scripts() if script.name not in TOOLS])
def test_every_benchmark_has_the_same_options(name: str) -> None:
    source = (ROOT / "benchmarks" / f"{name}.py").read_text()
    by_hand = all(f'"{option}"' in source for option in ("--json", "--quick", "--output"))
    assert "report.make_parser(" in source or by_hand


@pytest.mark.parametrize("name", [script.name for script in scripts()])
def test_every_script_starts_as_a_file_and_explains_itself(name: str, tmp_path: Path) -> None:
    files = tmp_path / "stdout", tmp_path / "stderr"
    status = fork_script(name, ["--help"], files).wait(60)
    assert status == 0, files[1].read_text()
    assert f"python -m benchmarks.{name}" in files[0].read_text()


@pytest.mark.parametrize("name", ["cluster", "end_to_end", "exposed", "quality"])
def test_the_launchers_start_in_a_new_interpreter(name: str) -> None:
    done = start_interpreter(name, "--help", timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"python -m benchmarks.{name}" in done.stdout


def test_stored_results_have_a_header() -> None:
    for name, found in load_results().items():
        for field in ("benchmark", "date", "command", "machine", "versions"):
            assert found[field], f"{name}: no {field}"


def test_publish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"side": "a", "ms": 1.23456}, {"side": "bc", "ms": 20.0}]
    output = tmp_path / "new" / "out.json"
    arguments = report.make_parser("", "").parse_args(["--output", str(output)])
    report.publish(arguments, {"rows": rows}, {"Title": rows}, "note")
    assert capsys.readouterr().out == "\nTitle\nvariant     ms\n      a  1.235\n     bc     20\nnote\n"
    assert json.loads(output.read_text()) == {"rows": rows}
    report.publish(report.make_parser("", "").parse_args(["--json"]), {"rows": rows}, {"Title": rows})
    assert json.loads(capsys.readouterr().out) == {"rows": rows}
