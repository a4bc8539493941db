"""The tour runs, and its page in the documentation has its text and its code."""

from __future__ import annotations

import csv
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tour.md"


def load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tour_page", ROOT / "docs" / "tour_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = load_maker()


def test_the_tour_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FREESCALE_CACHE", str(tmp_path / "cache"))
    script = list(maker.cells(maker.SCRIPT.read_text()))
    _, plan, trained, report, recommended = (text for text in maker.run(script) if text)
    assert re.search(r"^ +8 +random .* 1\.00x$", plan, re.MULTILINE)
    assert re.search(r"^The losses of all 10 steps are equal", trained, re.MULTILINE)
    assert re.search(r"^(A and B are equally fast|B is \d\.\d\dx (faster|slower)): ", trained, re.MULTILINE)
    assert "9 steps recorded (1 to 9)" in report
    assert (tmp_path / "report.html").exists()
    assert "The last event of 160 users, ranked among 200 items" in recommended
    # As the last cell says: the item that follows the last one of a user is on top, for nearly all users.
    last = dict(re.findall(r"^(user-\d+),item-(\d+),", (tmp_path / "events.csv").read_text(), re.MULTILINE))
    with (tmp_path / "recommendations.csv").open() as file:
        best = {row["user"]: row["item"] for row in csv.DictReader(file) if row["rank"] == "1"}
    assert best.keys() == last.keys()
    assert sum(best[user] == f"item-{(int(item) + 1) % 200}" for user, item in last.items()) > 0.8 * len(last)


def test_the_page_is_that_of_the_script() -> None:
    script = list(maker.cells(maker.SCRIPT.read_text()))
    expected = maker.page(script, [""] * len(script))
    assert maker.without_outputs(PAGE.read_text()) == expected, "run python docs/tour_page.py"
    assert maker.without_outputs(PAGE.read_text().replace("one event per line", "one event per row")) != expected


def test_the_page_shows_outputs_and_no_folder_of_a_machine() -> None:
    text = PAGE.read_text()
    assert text.count("```text\n") == 5
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root|usr)/", text)
