"""The suite as a whole: what is listed, the options all share, and that no figure in a table is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.__main__ import TOOLS, scripts
from benchmarks.harness import report
from benchmarks.harness.tables.claims import claims, command, kept
from benchmarks.harness.training.bubble import ALL, BASE, OVER_NCCL, SM_FREE, SYNC

ROOT = Path(__file__).resolve().parents[2]
# The listing, then a look at what it has imported.
LIST = """
import runpy, sys
try:
    runpy.run_module("benchmarks", run_name="__main__")
finally:
    print({"torch", "numpy", "lightning_freescale", "matplotlib"} & set(sys.modules), file=sys.stderr)
"""


def test_the_listing_names_all_and_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIST], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr.strip() == "set()"
    for script in scripts():
        assert f"{script.name}: {script.claim}" in done.stdout


def test_every_benchmark_says_what_it_is_and_how_to_run_it() -> None:
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


def test_results_say_where_they_come_from() -> None:
    for name, found in kept().items():
        for field in ("benchmark", "date", "command", "machine", "versions"):
            assert found[field], f"{name}: no {field}"


def test_the_tables_are_those_of_the_results() -> None:
    assert tables.stale() == [], "run python -m benchmarks.tables"


def test_another_figure_makes_another_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tables.results_table()
    results = kept()
    results["exposed_cpu"]["results"][2]["exposed_ms"]["prioritized"] = 77.0
    monkeypatch.setattr(tables, "kept", lambda: results)
    assert "77.0 ms" in tables.results_table()
    assert "77.0 ms" not in before
    assert ROOT / "README.md" in tables.stale()


def test_every_claim_has_its_command() -> None:
    for claim in claims(kept()):
        assert claim.command.startswith("python ")
        assert "--output" not in claim.command
        script = next(word for word in claim.command.replace("/", ".").split() if word.startswith("benchmarks."))
        assert (ROOT / "benchmarks" / f"{script.removesuffix('.py').split('.')[1]}.py").exists()
    assert (
        command({"command": "python -m benchmarks.a --output 'b c' --x 1 --json --plot d"})
        == "python -m benchmarks.a --x 1"
    )


def end_to_end(**sides: float) -> dict:
    """A result of ``benchmarks.end_to_end``: bubbles, of steps of 100 ms of compute."""
    return {
        "benchmark": "end_to_end",
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python -m benchmarks.end_to_end --output x.json",
        "machine": {"device": "a GPU"},
        "parameters": {"ranks": 4},
        "workload": {"longest": 8192},
        "same_batch_apart": 0.017,
        "sides": {
            name: {
                "step_ms": {"mean": 100 + bubble},
                "bubble_ms": bubble,
                "samples_per_second": 5000.0,
                "parts_ms": {"straggler": bubble},
                "gone": {BASE: 1 - bubble / 50},
            }
            for name, bubble in sides.items()
        },
        "losses": {"equal": True},
        "goal": {"gone": 0.903, "reached": 0.9},
    }


def test_end_to_end_has_its_row_and_its_table() -> None:
    (claim,) = claims({"end_to_end_h200": end_to_end(**{BASE: 50.0, ALL: 4.0})})
    assert claim.claim.endswith("histories to 8,192 events, 4 ranks, a GPU; losses equal")
    assert claim.before.startswith("50.0 of 150.0 ms")
    assert "92.0% gone. What is left: straggler 4.0 ms; the same batch's compute differs by ±1.7%" in claim.after
    assert claim.date == "2026-01-02"
    ((_, rows),) = tables.views(end_to_end(**{BASE: 50.0, ALL: 4.0}))
    assert [(row["side"], row["bubble"], row[f"of {BASE} gone"]) for row in rows] == [
        (BASE, 50, "0.0%"),
        (ALL, 4, "92.0%"),
    ]
    assert list(claims({"end_to_end_h200": end_to_end(**{BASE: 50.0})})) == []  # a side failed
    (same,) = claims({"end_to_end_h200": end_to_end(**{BASE: 50.0, SM_FREE: 20.0, OVER_NCCL: 10.0, ALL: 4.0})})
    assert (
        "80.0% of the 20.0 ms of a synchronous exchange over the SM-free transport; all over NCCL 80.0% gone"
        in same.after
    )


@pytest.mark.parametrize(
    ("side", "after"), [("freescale", "`freescale`, all on `auto`"), (SYNC, f"`{SYNC}` once more")]
)
def test_where_nothing_is_to_be_won(side: str, after: str) -> None:
    found = {
        "benchmark": "cannot_help",
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python -m benchmarks.cannot_help",
        "machine": "a GPU",
        "parameters": {"ranks": 4, "control": side == SYNC},
        "sides": [{"side": SYNC, "ms a step": 20.0}, {"side": side, "ms a step": 19.9}],
        "goal": {"reached": 0.995, "error": 0.004},
    }
    (claim,) = claims({"cannot_help": found})
    assert claim.claim.endswith("4 ranks, a GPU" + (": control" if side == SYNC else ""))
    assert claim.before == "`freescale_sync`: 20.0 ms a step"
    assert claim.after == f"{after}: 19.9 ms, 0.995 ± 0.004 of it"


def test_the_marks_must_be_there() -> None:
    assert (
        tables.between_marks(f"a {tables.BEGIN} old {tables.END} b", "new") == f"a {tables.BEGIN}\nnew\n{tables.END} b"
    )
    with pytest.raises(ValueError, match="has no <!-- end"):
        tables.between_marks(tables.BEGIN, "new")


def test_publish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"side": "a", "ms": 1.23456}, {"side": "bc", "ms": 20.0}]
    output = tmp_path / "new" / "out.json"
    arguments = report.make_parser("", "").parse_args(["--output", str(output)])
    report.publish(arguments, {"rows": rows}, {"Title": rows}, "note")
    assert capsys.readouterr().out == "\nTitle\nside     ms\n   a  1.235\n  bc     20\nnote\n"
    assert json.loads(output.read_text()) == {"rows": rows}
    report.publish(report.make_parser("", "").parse_args(["--json"]), {"rows": rows}, {"Title": rows})
    assert json.loads(capsys.readouterr().out) == {"rows": rows}
