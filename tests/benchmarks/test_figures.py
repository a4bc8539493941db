"""The paper's figures: their numbers on small examples, and that they can be drawn from the stored results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import figures
from benchmarks.harness import figure_drawing
from benchmarks.harness.results import load_results
from benchmarks.harness.tables import paper_page
from lightning_freescale.data.histories import Histories

RESULTS = load_results()


def data(items: np.ndarray) -> figures.FigureData:
    """One history per row."""
    users, events = items.shape
    offsets = np.arange(users + 1) * events
    histories = Histories(
        items.ravel(), np.zeros(items.size, np.int64), offsets, np.arange(items.max() + 1), np.arange(users)
    )
    return figures.FigureData("made", np.full(users, events), histories)


def test_batches_of_the_same_items_collide_and_of_different_ones_do_not() -> None:
    same, different = data(np.tile(np.arange(5), (64, 1))), data(np.arange(320).reshape(64, 5))
    assert [(row["samples"], row["collisions %"]) for row in figures.collisions(same, pairs=2)] == [
        (16, 100),
        (32, 100),
    ]
    assert [(row["samples"], row["collisions %"]) for row in figures.collisions(different, pairs=2)] == [
        (16, 0),
        (32, 0),
    ]


def test_half_of_the_ids_collide() -> None:
    half = np.arange(320).reshape(64, 5)
    half = np.column_stack([half, np.tile(np.arange(320, 325), (64, 1))])
    assert figures.collisions(data(half), pairs=1)[0]["collisions %"] == 50


def test_equal_histories_have_no_padding_and_no_stragglers() -> None:
    for row in figures.measure(data(np.zeros((64, 5), np.int64)), 3, 4, 8, batches=2):
        assert (row["max history"], row["sparsity %"], row["straggler %"]) == (3, 0, 0)


def test_a_file_of_events_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    rows = [f"{user},{item},{item}" for user, count in (("a", 3), ("b", 5)) for item in range(count)]
    path.write_text("user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    found = figures.read(path)
    assert found.name == "events"
    assert sorted(found.lengths) == [3, 5]
    assert found.histories.num_items == 5


@pytest.mark.parametrize(
    "name", ["history", "size_and_ranks", "collisions", "kernels", "exposed", "sm_free", "end_to_end"]
)
def test_images_are_drawn_from_the_stored_results(name: str, tmp_path: Path) -> None:
    stored = RESULTS["figures"]
    arguments = {
        "history": [stored["history"]],
        "size_and_ranks": [stored["batch size"], stored["ranks"]],
        "collisions": [stored["collisions"]],
        "kernels": [RESULTS["balance_cpu"]["kernels"]],
    }.get(name, [RESULTS])
    getattr(figure_drawing, f"draw_{name}")(*arguments, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_the_page_shows_existing_images_and_leaves_out_missing_results() -> None:
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    sections = list(paper_page.sections(RESULTS))
    assert len(sections) == 9
    for section in sections:
        assert (folder / section.image).exists()
    without = {name: found for name, found in RESULTS.items() if name != "simulate"}
    assert "simulated" in paper_page.page(RESULTS)
    assert "simulated" not in paper_page.page(without)
