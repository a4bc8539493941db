"""The generated pages: no figure is typed by hand, and each claim is computed from its stored result."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.harness import labels
from benchmarks.harness.results import EARLIER, command, load_results, short_machine
from benchmarks.harness.tables import benchmarks_page, exchange_blocks, markdown, readme_block, results_blocks
from benchmarks.harness.tables.claims import claims
from benchmarks.harness.variant_names import (
    ALL,
    ALL_OVER_NCCL,
    ALL_OVER_TCP,
    SM_FREE,
    SYNC,
    TORCHREC_BASE,
    TORCHREC_SPARSE_DIST,
)

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_agree_with_the_results() -> None:
    assert list(tables.stale()) == [], "run python -m benchmarks.tables"


def test_the_readme_has_the_range_of_all_shapes() -> None:
    results = load_results() | load_results(EARLIER)

    def gone(shape: str, side: str) -> set[int]:
        rounds = results[f"end_to_end_h200_{shape}"]["rounds"][side]
        return {
            round(100 * statistics.mean(rounds[f"gone of {name}"])) for name in (TORCHREC_BASE, TORCHREC_SPARSE_DIST)
        }

    shapes = "short_1", "short_2", "short_3", "short_4", "short_newest", "long_newest", "context_newest", "wide_newest"
    in_memory = set.union(*(gone(shape, ALL) for shape in (*shapes, "medium_newest")))
    over_tcp = set.union(*(gone(shape, ALL_OVER_TCP) for shape in shapes))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{min(in_memory)}% to {max(in_memory)}% of the bubble of either pipeline" in text
    assert f"{min(over_tcp)}% to {max(over_tcp)}% over TCP" in text
    slow = gone("medium_newest", ALL_OVER_TCP)
    assert f": {min(slow)}% and {max(slow)}% (" in text


def test_another_figure_changes_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    results = load_results()
    before = results_blocks.summary(results)
    results["exposed_cpu"]["results"][2]["exposed_ms"]["prioritized"] = 77.0
    assert "77.0 ms" in results_blocks.summary(results)
    assert "77.0 ms" not in before
    results["exposed_h200"]["results"][1]["beyond_dense_ms"]["prioritized"] = 78.0
    monkeypatch.setattr(tables, "load_results", lambda: results)
    assert ROOT / "README.md" in tables.stale()
    assert ROOT / "docs" / "results.md" in tables.stale()


def test_every_claim_has_its_command() -> None:
    for claim in claims(load_results()):
        assert claim.command.startswith("python ")
        assert "--output" not in claim.command
        script = next(word for word in claim.command.replace("/", ".").split() if word.startswith("benchmarks."))
        assert (ROOT / "benchmarks" / f"{script.removesuffix('.py').split('.')[1]}.py").exists()
    stored = {"command": "python -m benchmarks.a --output 'b c' --x 1 --json --plot d"}
    assert command(stored) == "python -m benchmarks.a --x 1"


def test_cells_of_the_summary_are_short() -> None:
    for claim in claims(load_results()):
        for name, text in claim._asdict().items():
            assert len(text) <= 72 or name == "command", text


def test_the_readme_has_four_results() -> None:
    rows = list(readme_block.rows(load_results()))
    assert len(rows) == 4
    assert all(list(row) == ["claim", "before", "after", "command"] for row in rows)
    assert list(readme_block.rows({})) == []


def end_to_end(**bubbles: float) -> dict[str, Any]:
    """A result of ``benchmarks.end_to_end``: bubbles in ms, beside 100 ms of compute."""
    return {
        "benchmark": "end_to_end",
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python -m benchmarks.end_to_end --output x.json",
        "machine": {"device": "NVIDIA G1", "cores": "8 cores of its own a rank"},
        "parameters": {"ranks": 4},
        "workload": {"longest": 8192},
        "same_batch_apart": 0.017,
        "sides": {
            name: {
                "step_ms": {"mean": 100 + bubble},
                "bubble_ms": bubble,
                "samples_per_second": 5000.0,
                "parts_ms": {"straggler": bubble},
                "gone": {TORCHREC_BASE: 1 - bubble / 50},
            }
            for name, bubble in bubbles.items()
        },
        "losses": {"equal": True},
        "goal": {"gone": 0.903, "reached": 0.9},
    }


def test_end_to_end_has_its_summary_and_its_tables() -> None:
    found = end_to_end(**{TORCHREC_BASE: 50.0, ALL: 4.0})
    (claim,) = claims({"end_to_end_h200": found})
    assert claim.setting == "histories up to 8,192 events, 4 ranks"
    assert claim.machine == "one G1, SMs reserved"
    assert claim.before == "50.0 of 150.0 ms (TorchRec)"
    assert claim.after == "4.0 of 104.0 ms"
    assert claim.change == "-92.0%"
    assert claim.date == "2026-01-02"
    rows = list(results_blocks.end_to_end({"one": found}))
    assert [(row["variant"], row["bubble removed"], row["losses"]) for row in rows] == [
        (TORCHREC_BASE, "-", "equal"),
        (ALL, "92.0%", "equal"),
    ]
    (remaining,) = results_blocks.remaining_bubble({"one": found})
    assert (remaining["straggler"], remaining["noise of the compute"]) == ("4.0", "±1.7%")
    ((_, rows),) = benchmarks_page.views(found)
    assert [(row["side"], row["bubble"], row[f"removed of {TORCHREC_BASE}"]) for row in rows] == [
        (TORCHREC_BASE, 50, "0.0%"),
        (ALL, 4, "92.0%"),
    ]


def test_end_to_end_of_a_dlrm() -> None:
    found = end_to_end(**{TORCHREC_BASE: 50.0, ALL: 4.0}) | {"workload": {"clicks": 26}}
    (claim,) = claims({"end_to_end_h200_dlrm": found})
    assert claim.setting.startswith("26 bags (DLRM), ")
    assert {row["longest history"] for row in results_blocks.end_to_end({"one": found})} == {"26 bags (DLRM)"}


def test_end_to_end_over_the_same_link() -> None:
    found = end_to_end(**{TORCHREC_BASE: 50.0, SM_FREE: 20.0, ALL_OVER_NCCL: 10.0, ALL: 4.0})
    rows = list(results_blocks.same_link({"one": found}))
    assert [(row["before"], row["after"], row["bubble removed"]) for row in rows] == [
        ("+ SM-free: 20.0 ms", "all: 4.0 ms", "80.0%"),
        ("TrainPipelineBase: 50.0 ms", "all over NCCL: 10.0 ms", "80.0%"),
    ]


def test_shapes_show_the_limit_of_a_step_if_a_result_has_it() -> None:
    stored = load_results()["end_to_end_h200_short_newest"]
    old = {**stored, "rounds": {side: {"step_ms": by_round["step_ms"]} for side, by_round in stored["rounds"].items()}}
    new = {
        **old,
        "rounds": old["rounds"] | {ALL: {"step_ms": [24.0, 25.0], "transfers_ms": [8.0, 9.0], "of_limit": [1.0, 1.2]}},
    }
    assert all("step / limit" not in row for row in exchange_blocks.shapes({"end_to_end_h200_short": old}))
    rows = list(exchange_blocks.shapes({"end_to_end_h200_short": old, "end_to_end_h200_short_newest": new}))
    shown = [(row["transfers alone ms"], row["step / limit"]) for row in rows if row["variant"] == ALL]
    assert shown == [("", ""), ("8.5", "1.10")]


def test_end_to_end_without_all_variants_has_no_claim() -> None:
    failed = {"one": end_to_end(**{TORCHREC_BASE: 50.0})}
    assert list(claims(failed)) == []
    assert list(results_blocks.end_to_end(failed)) == []


@pytest.mark.parametrize(("name", "after"), [("freescale", "(`freescale`)"), (SYNC, f"(`{SYNC}` again)")])
def test_no_speed_up_expected(name: str, after: str) -> None:
    found = {
        "benchmark": "cannot_help",
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python -m benchmarks.cannot_help",
        "machine": "a machine",
        "parameters": {"ranks": 4, "control": name == SYNC},
        "sides": [{"side": SYNC, "ms a step": 20.0}, {"side": name, "ms a step": 19.9}],
        "goal": {"reached": 0.995, "error": 0.004},
    }
    (claim,) = claims({"cannot_help": found})
    assert claim.claim == "no speed-up expected" + (": control" if name == SYNC else "")
    assert (claim.setting, claim.machine) == ("equal short histories, a tiny table, 4 ranks", "a machine")
    assert claim.before == "20.0 ms per step (`freescale_sync`)"
    assert claim.after == f"19.9 ms per step {after}"
    assert claim.change == "ratio 0.995 ± 0.004"
    (row,) = results_blocks.cannot_help({"cannot_help": found})
    assert row["ratio"] == "0.995 ± 0.004"
    assert ("control" in row["compared"]) == (name == SYNC)


def test_a_block_is_replaced_and_its_markers_are_required() -> None:
    text = f"a <!-- results: one --> old {markdown.END} b <!-- results: two --> old {markdown.END} c"
    filled = markdown.fill_block("page", text, "two", "new")
    assert filled == f"a <!-- results: one --> old {markdown.END} b <!-- results: two -->\nnew\n{markdown.END} c"
    assert markdown.fill_block("page", filled, "two", "new") == filled
    with pytest.raises(ValueError, match="page has no marker <!-- results: three -->"):
        markdown.fill_block("page", text, "three", "new")
    with pytest.raises(ValueError, match="page has no <!-- end of results -->"):
        markdown.fill_block("page", "<!-- results: one -->", "one", "new")


@pytest.mark.parametrize(
    ("stored", "shown", "short"),
    [
        ("NVIDIA H200, 32 cores of its own a rank", "NVIDIA H200, 32 SMs reserved per rank", "one H200, SMs reserved"),
        (
            "NVIDIA H200, 25 % of its cores a rank",
            "NVIDIA H200, at most 25% of the SMs per rank, not reserved",
            "one H200, SMs not reserved",
        ),
        ("NVIDIA H200", "NVIDIA H200", "one H200"),
        ("2 cores (aarch64)", "2 cores (aarch64)", "2 CPU cores"),
    ],
)
def test_descriptions_of_machines(stored: str, shown: str, short: str) -> None:
    assert labels.machine(stored) == shown
    assert short_machine({"machine": stored}) == short


def test_labels_of_columns_and_of_transports_are_separate() -> None:
    assert labels.label("side") == "variant"
    assert labels.label("freescale") == "freescale"  # a strategy
    assert labels.value_label("freescale") == "SM-free"  # a transport
