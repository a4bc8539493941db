"""``freescale report`` on runs with known figures: tables, advice, trace, and the page in a real browser."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from lightning_freescale.bubbles.analysis import analyse
from lightning_freescale.bubbles.comparison import comparison_sentence
from lightning_freescale.bubbles.records import RecordWriter, histogram, rank_file, read_run, to_record
from lightning_freescale.bubbles.spans import Step
from lightning_freescale.bubbles.trace import write_trace
from lightning_freescale.cli import report
from lightning_freescale.runtime.errors import InputError
from tests.bubbles.synthetic_runs import engine, write_run
from tests.cli import browser as browsers

STEPS = [(10.0, 20.0)] * 8 + [(10.0, 40.0)]  # ms of compute by rank; rank 0 waits for rank 1, longest in the last step


# ---- figures -------------------------------------------------------------------------------------------------------
def test_the_figures_of_a_known_run(tmp_path: Path) -> None:
    analysis = analyse(read_run(write_run(tmp_path, STEPS)))
    waits = [10.0] * 8 + [30.0]
    assert analysis.ms("straggler") == pytest.approx(np.mean(waits) / 2)
    assert analysis.ms("exposed_embedding") == pytest.approx(5.0)
    assert analysis.ms("input_wait") == pytest.approx(3.0)
    assert analysis.ms("other") == pytest.approx(1.0)
    assert analysis.ms("wall") == pytest.approx(np.mean([20.0] * 8 + [40.0]) + 9.0)
    assert (analysis.typical, analysis.worst) == (4, 8)
    assert analysis.summary["embedding/collision_rate"] == pytest.approx(0.12)
    assert analysis.summary["balance/imbalance"] == pytest.approx((8 * 20 / 15 + 40 / 25) / 9)
    assert analysis.histograms("lengths") == [histogram([10, 20] * 9), histogram([20, 40] * 9)]


def test_clock_offsets_do_not_change_the_figures(tmp_path: Path) -> None:
    skewed = analyse(read_run(write_run(tmp_path / "skewed", STEPS, offsets=(0.0, -5000.0))))
    plain = analyse(read_run(write_run(tmp_path / "plain", STEPS)))
    assert skewed.ms("straggler") == pytest.approx(plain.ms("straggler"), rel=1e-4)


@pytest.mark.parametrize(
    ("computes", "exchange", "settings", "words"),
    [
        ([(10.0, 50.0)] * 4, 1.0, {"balance": "off"}, ["straggler wait: use balance='fixed'", "time at best: 35 ms (now 55 ms)"]),
        ([(10.0, 50.0)] * 4, 1.0, {"balance": "fixed"}, ["although balance='fixed'", "Use balance='variable'"]),
        ([(50.0, 50.0)] * 4, 40.0, {}, ["88% of the rows", "use prioritize=True", "time at best: 58.8 ms (now 94 ms)"]),
        ([(50.0, 50.0)] * 4, 40.0, {"prioritize": True}, ["although it is prioritized", "collisions (12% of the rows)"]),
        ([(50.0, 50.0)] * 4, 40.0, {"prioritize": "auto"}, ["use prioritize=True (prioritize='auto' found no gain"]),
        ([(5.0, 5.0)] * 4, 0.1, {}, ["waiting for the next batch: raise num_workers"]),
        ([(1000.0, 1000.0)] * 4, 0.1, {}, ["No part of it is large enough to be worth a change"]),
    ],
)  # fmt: skip
def test_advice(computes: list, exchange: float, settings: dict, words: list[str], tmp_path: Path) -> None:
    analysis = analyse(read_run(write_run(tmp_path, computes, exchange, settings or {"balance": "off"})))
    assert all(word in analysis.advice[0].text for word in words), analysis.advice


def test_rows_that_all_collide_are_not_worth_prioritizing(tmp_path: Path) -> None:
    advice = analyse(read_run(write_run(tmp_path, [(50.0, 50.0)] * 4, 40.0, collisions=99))).advice[0]
    assert (
        "99% of the rows are collisions (shared by consecutive batches), which prioritizing cannot hide" in advice.text
    )


def slowed(index: int, rank: int, part: str) -> Step:
    """Rank 1 spends 30 ms longer on ``part``, and rank 0 waits for it in the exchange. Both batches cost the same."""
    start = 100.0 + index * 0.06
    parts = {"input_wait": 3.0, "idle": 1.0, "dense_forward": 10.0}
    late = parts | {part: parts[part] + 30.0}
    wait = 5.0 + (30.0 if rank == 0 else 0.0)
    spans = engine(*(late if rank else parts).items(), ("gradient_exchange", wait), start=start)
    return Step(index, start, start + 0.05, spans, {"cost": 7.0, "rows": 10})


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("dense_forward", ["although the batches of all ranks cost the same", "rank 1, which computes longer"]),
        ("input_wait", ["rank 1, which waits for its DataLoader"]),
        ("idle", ["rank 1, which spends more time outside of the step"]),
    ],
)
def test_advice_names_the_straggler_and_its_reason(part: str, words: list[str], tmp_path: Path) -> None:
    for rank in range(2):
        writer = RecordWriter(rank_file(tmp_path, rank), {"world": 2})
        for index in range(4):
            writer.write(to_record(slowed(index, rank, part)))
        writer.close()
    analysis = analyse(read_run(tmp_path))
    assert analysis.ms("straggler") == pytest.approx(15.0)
    assert any(all(word in advice.text for word in words) for advice in analysis.advice), analysis.advice


def test_histogram() -> None:
    assert histogram([0, 1, 2, 3, 4, 1000]) == [2, 2, 1, 0, 0, 0, 0, 0, 0, 1]
    assert histogram([]) == []


# ---- the command ---------------------------------------------------------------------------------------------------
def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return report.run(parser.parse_args([str(argument) for argument in arguments]))


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert command(write_run(tmp_path, STEPS)) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0].strip() or line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["bubble"] == ["bubble", "15.11", "48.4%"]
    assert [line.split() for line in lines if line.startswith("  straggler")] == [["straggler", "6.11", "19.6%", "40%"]]
    assert ["1", "22.22", "0.00", "5.00", "0.00", "0.00", "3.00", "1.00", "60"] in [line.split() for line in lines]
    assert (tmp_path / "freescale" / "trace.json").exists()


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    before = write_run(tmp_path / "before", [(10.0, 50.0)] * 4)
    after = write_run(tmp_path / "after", [(30.0, 30.0)] * 4, settings={"balance": "fixed"})
    command(before, after)
    lines = [line.split() for line in capsys.readouterr().out.split("B / A")[1].splitlines()]
    assert ["step", "ms", "59.00", "39.00", "0.66"] in lines
    assert ["straggler", "ms", "20.00", "0.00", "0.00"] in lines
    assert ["embedding/collision_rate", "12.0%", "12.0%", "1.00"] in lines
    assert all((run / "freescale" / "trace.json").exists() for run in (before, after))


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        ([(10.0, 50.0)], [(30.0, 30.0)], "B is 1.51x faster: the wait for stragglers fell from 34% to 0% of a step."),
        ([(30.0, 30.0)], [(10.0, 50.0)], "B is 1.51x slower: the wait for stragglers rose from 0% to 34% of a step."),
        ([(60.0, 60.0)], [(30.0, 30.0)], "B is 1.77x faster: useful work fell from 60 ms to 30 ms per step."),
        ([(30.0, 30.0)], [(30.1, 30.1)], "A and B are equally fast: a step takes 39 ms in A and 39.1 ms in B."),
    ],
)
def test_a_comparison_starts_with_one_sentence(
    a: list, b: list, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    runs = write_run(tmp_path / "a", a * 4), write_run(tmp_path / "b", b * 4)
    command(*runs)
    assert f"\n\n{sentence}\n\nA  " in capsys.readouterr().out
    assert json.dumps(sentence) in report.page([analyse(read_run(run)) for run in runs])


def test_a_share_that_rises_while_its_time_falls_is_told_in_ms(tmp_path: Path) -> None:
    """The time of the exchange falls from 20 to 9.7 ms, but its share of the much shorter step rises."""
    first = analyse(read_run(write_run(tmp_path / "a", [(15.0, 15.0)] * 4, 20.0)))
    second = analyse(read_run(write_run(tmp_path / "b", [(5.0, 5.0)] * 4, 9.7)))
    sentence = comparison_sentence(first, second)
    assert sentence == "B is 2.09x faster: the exposed embedding exchange fell from 20 ms to 9.7 ms per step."


def test_main_parses_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_run(tmp_path, STEPS)
    assert report.main([str(tmp_path), "--trace", str(tmp_path / "mine.json")], prog="freescale report") == 0
    assert (tmp_path / "mine.json").exists()
    with pytest.raises(SystemExit):
        report.main(["--help"], prog="freescale report")
    assert "RUN_DIR" in capsys.readouterr().out


# ---- bad input -----------------------------------------------------------------------------------------------------
def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder has no freescale/rank_\*.jsonl. The monitor records only if"):
        read_run(tmp_path)
    write_run(tmp_path / "lightning_logs" / "version_3", STEPS)
    with pytest.raises(InputError, match=r"Did you mean .*version_3"):
        read_run(tmp_path)
    with pytest.raises(InputError, match="nowhere"):
        read_run(tmp_path / "nowhere")


def test_a_missing_rank_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, STEPS)
    rank_file(tmp_path, 1).unlink()
    with pytest.raises(InputError, match="files of 1 ranks, but the run had 2 ranks"):
        read_run(tmp_path)


def test_damaged_lines_are_ignored(tmp_path: Path) -> None:
    write_run(tmp_path, STEPS)
    path = rank_file(tmp_path, 1)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], lines[4][:50], *lines[5:-1], lines[-1][:20]]))
    assert read_run(tmp_path).indices == [0, 1, 2, 4, 5, 6, 7]


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    RecordWriter(rank_file(tmp_path, 0), {"freescale": 2}).close()
    with pytest.raises(InputError, match="format 2, but this version reads only format 1"):
        read_run(tmp_path)


def test_a_step_trained_again_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path, STEPS)
    write_run(tmp_path, [(10.0, 10.0)] * 3)  # resumed from the start
    analysis = analyse(read_run(tmp_path))
    assert analysis.indices == list(range(9))
    assert analysis.bubbles.parts["straggler"][0, :4] == pytest.approx([0, 0, 0, 0.01])


# ---- the trace -----------------------------------------------------------------------------------------------------
def test_the_trace_has_a_track_for_every_rank_and_stream(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, STEPS))
    write_trace(run, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == sorted(["steps", "compute", "exchange"] * 2)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * 9 * (1 + 3 + 1)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    last = [e for e in spans if e["args"]["step"] == 8 and e["name"] == "gradient_exchange"]
    assert [(e["pid"], names[e["pid"], e["tid"]], e["dur"]) for e in last] == [
        (0, "compute", pytest.approx(35e3)),
        (1, "compute", pytest.approx(5e3)),
    ]
    assert last[0]["ts"] + 30e3 == pytest.approx(last[1]["ts"])


# ---- the page ------------------------------------------------------------------------------------------------------
def test_the_page_loads_nothing_from_the_network_and_escapes_names(tmp_path: Path) -> None:
    text = report.page([analyse(read_run(write_run(tmp_path / "</script><b>", STEPS)))])
    assert "</script><b>" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_page_of_many_steps_keeps_the_typical_and_the_slowest_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MAX_DRAWN", 10)
    analysis = analyse(read_run(write_run(tmp_path, [(10.0, 20.0 + (i == 33)) for i in range(40)])))
    drawn = report._drawn(analysis)
    assert len(drawn) <= 6
    assert {analysis.typical, 33} <= set(drawn)


needs_chromium = pytest.mark.skipif(browsers.CHROMIUM is None, reason="chromium is not installed")


@needs_chromium
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", STEPS)
    assert command(run, "--html", tmp_path / "out.html") == 0
    with browsers.Browser(tmp_path / "profile") as browser:
        browser.open(tmp_path / "out.html")
        count = "document.querySelectorAll({!r}).length"
        assert browser.evaluate(count.format("#gantt-typical-0 .span")) == 2 * 4 + 1  # rank 0 waits for the straggler
        assert browser.evaluate(count.format('#gantt-worst-0 .span[data-kind="straggler"]')) == 1
        assert browser.evaluate(count.format(".step-bar")) == 9
        assert browser.evaluate(count.format(".histogram path")) == 4
        assert browser.evaluate(count.format("#spans-0")) == 0
        browser.click('.step-bar[data-step="8"] .hit')
        rows = browser.evaluate(
            "[...document.querySelectorAll('#spans-0 tbody tr')].map(r => [...r.children].map(c => c.textContent))"
        )
        assert ["0", "compute", "straggler", "13.000", "30.000"] in rows
        assert ["1", "exchange", "allreduce", "4.000", "2.000"] in rows
        assert len(rows) == 2 * 4 + 1
        assert browser.evaluate(count.format("#gantt-picked-0 .span")) == len(rows)
        assert "Step 8" in browser.evaluate("document.getElementById('picked-0').textContent")
        browser.click('.step-bar[data-step="2"] .hit')
        assert "Step 2" in browser.evaluate("document.getElementById('picked-0').textContent")
        assert browser.complaints() == []
        assert all(url.startswith(("file:", "data:")) for url in browser.requested())
        # Show that the check can fail.
        browser.evaluate("console.error('a complaint')")
        assert len(browser.complaints()) == 1


def press(browser: browsers.Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode={"Tab": 9}.get(key, 0)
        )


@needs_chromium
def test_two_runs_in_a_browser(tmp_path: Path) -> None:
    """On a phone and on a wide screen, in light and dark, with the mouse and with the keyboard."""
    first = write_run(tmp_path / "a_folder_with_a_name_that_is_much_longer_than_a_phone_is_wide", STEPS)
    second = write_run(tmp_path / "b", [(15.0, 15.0)] * 5)
    command(first, second, "--html", tmp_path / "out.html")
    picked = "document.querySelector('#picked-{} h2')?.textContent"
    with browsers.Browser(tmp_path / "profile") as browser:
        papers = set()
        for width, scheme in ((400, "light"), (1400, "dark")):
            browser.resize(width, scheme)
            browser.open(tmp_path / "out.html")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert (
                browser.evaluate(
                    "Math.min(...[...document.querySelectorAll('.gantt')].map(g => g.viewBox.baseVal.width))"
                )
                <= width
            )
            papers.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert "ms31.224.0" in browser.evaluate("document.querySelector('#compared').textContent")
            assert browser.evaluate("document.querySelectorAll('.gantt').length") == 4
        assert len(papers) == 2, "the dark page has another background"
        sentence = "B is 1.30x faster: the wait for stragglers fell from 20% to 0% of a step."
        assert browser.evaluate("document.querySelector('#comparison p').textContent") == sentence
        browser.click('#run-1 .step-bar[data-step="1"] .hit')
        assert browser.evaluate("document.querySelectorAll('#spans-1 tbody tr').length") == 2 * 4
        assert browser.evaluate("document.querySelector('#spans-0')") is None
        press(browser, "Tab")  # to the table of the spans
        assert browser.evaluate("document.activeElement.getAttribute('aria-label')") == "Spans of step 1"
        browser.evaluate("document.querySelector('#run-0 .over-time').focus()")
        for key, step in (
            ("ArrowRight", 0),
            ("ArrowRight", 1),
            ("End", 8),
            ("ArrowRight", 8),
            ("ArrowLeft", 7),
            ("Home", 0),
        ):
            press(browser, key)
            assert browser.evaluate(picked.format(0)) == f"Step {step}", key
        assert browser.evaluate("document.activeElement.getAttribute('aria-valuetext')").startswith("step 0: ")
        browser.resize(700, "dark")  # draws again, and keeps the chosen steps
        browser.wait_until("document.querySelector('.gantt').viewBox.baseVal.width < 700")
        assert [browser.evaluate(picked.format(run)) for run in (0, 1)] == ["Step 0", "Step 1"]
        assert browser.complaints() == []
        # Show that the check of the width can fail.
        browser.evaluate(
            "document.body.append(Object.assign(document.createElement('div'), {style: 'width: 2000px; height: 1px'}))"
        )
        assert browser.evaluate("document.documentElement.scrollWidth") > 1400
