"""Every source gives the histories of the reference, and errors name the file, the row and the reason."""

from __future__ import annotations

import csv
import logging
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

import lightning_freescale.data.preprocess as preprocess_module
from lightning_freescale.data.histories import Histories
from lightning_freescale.data.preprocess import preprocess
from lightning_freescale.data.sources import open_source
from lightning_freescale.runtime.errors import InputError
from tests.data.reference import Event, check, random_events, reference


def read(path: Path, min_events: int = 3, **options: Any) -> Histories:
    folder = path.parent / f"{path.name}.out"
    folder.mkdir()
    preprocess(open_source(path, **options), folder, min_events)
    return Histories.load(folder)


def write_csv(
    path: Path, events: list[Event], header: tuple[str, ...] = ("userId", "movieId", "timestamp", "rating")
) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(events)
    return path


def write_events(path: Path, events: list[Event], **options: Any) -> Path:
    columns = dict(zip(("user", "item", "time", "rating"), map(list, zip(*events, strict=True)), strict=True))
    pq.write_table(pa.table(columns), path, **options)
    return path


def write_users(path: Path, events: list[Event], **options: Any) -> Path:
    rows: dict[Any, list[Event]] = {}
    for event in events:
        rows.setdefault(event.user, []).append(event)
    table = pa.table(
        {
            "user": list(rows),
            "items": [[event.item for event in own] for own in rows.values()],
            "times": [[event.time for event in own] for own in rows.values()],
            "rating": [[event.feature for event in own] for own in rows.values()],
        }
    )
    pq.write_table(table, path, **options)
    return path


WRITERS = {"csv": write_csv, "events.parquet": write_events, "users.parquet": write_users}


@pytest.fixture
def events() -> list[Event]:
    return random_events(np.random.default_rng(7))


@pytest.mark.parametrize("chunk", [1 << 22, 7])
@pytest.mark.parametrize("suffix", WRITERS)
def test_round_trip(
    tmp_path: Path, events: list[Event], suffix: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess_module, "CHUNK_EVENTS", chunk)  # with 7, users and ties span many chunks
    path = WRITERS[suffix](tmp_path / f"data.{suffix}", events)
    check(read(path, feature_columns=("rating",)), reference(events), "rating")


def test_the_check_detects_swapped_events_of_equal_time(tmp_path: Path, events: list[Event]) -> None:
    events = [event._replace(feature=None) for event in events]
    expected = reference(events)
    histories = read(write_csv(tmp_path / "data.csv", events))
    check(histories, expected)
    own = expected[min(expected)]
    tie = next(at for at, (a, b) in enumerate(pairwise(own)) if a.time == b.time and a.item != b.item)
    own[tie], own[tie + 1] = own[tie + 1], own[tie]
    with pytest.raises(AssertionError):
        check(histories, expected)


@pytest.mark.parametrize("row_group_size", [1, 5, 1000])
@pytest.mark.parametrize("write", [write_events, write_users])
def test_row_groups(tmp_path: Path, events: list[Event], write: Any, row_group_size: int) -> None:
    path = write(tmp_path / "data.parquet", events, row_group_size=row_group_size)
    check(read(path, feature_columns=("rating",)), reference(events), "rating")


def test_folder_of_parquet_files(tmp_path: Path, events: list[Event]) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in range(3):
        write_events(folder / f"{part}.parquet", events[part * 100 : (part + 1) * 100])
    for unfinished in ("_temporary/0.parquet", ".0.parquet", "date=1/_delta_log/0.parquet"):
        (folder / unfinished).parent.mkdir(parents=True, exist_ok=True)
        write_events(folder / unfinished, events[:100])
    check(read(folder, feature_columns=("rating",)), reference(events), "rating")


def test_tabs_in_a_file_with_an_upper_case_suffix(tmp_path: Path) -> None:
    (tmp_path / "d.TSV").write_text("user\titem\ttime\n1\t2\t3\n1\t3\t4\n1\t4\t5\n")
    assert read(tmp_path / "d.TSV").item_ids.tolist() == [2, 3, 4]


def test_text_pairs(tmp_path: Path, events: list[Event]) -> None:
    path = tmp_path / "pairs.txt"
    gaps = [" ", "\t", "   ", " \t "]
    lines = [f"{'  ' * (at % 2)}{e.user}{gaps[at % 4]}{e.item}{' ' * (at % 3)}" for at, e in enumerate(events)]
    path.write_text("\n".join(lines) + "\n\n")
    numbered = [Event(event.user, event.item, line) for line, event in enumerate(events, start=1)]
    check(read(path), reference(numbered))


ids = st.one_of(
    st.lists(st.integers(0, 9), min_size=30, max_size=60),
    st.lists(st.text("abcé-_.07", min_size=1, max_size=4), min_size=30, max_size=60),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    users=ids,
    items=ids,
    times=st.lists(st.integers(0, 2**37), min_size=30, max_size=60),
    suffix=st.sampled_from([*WRITERS]),
)
def test_ids_of_any_kind(tmp_path_factory: Any, users: list, items: list, times: list[int], suffix: str) -> None:
    events = [Event(*values, 0.5) for values in zip(users, items, times, strict=False)]
    if suffix == "csv":  # text cannot distinguish 7 and "7": ids that all look like integers are integers
        events = _as_read_from_text(events, min_events=2)
    path = WRITERS[suffix](tmp_path_factory.mktemp("any") / f"data.{suffix}", events)
    expected = reference(events, min_events=2)
    if not expected:
        with pytest.raises(InputError, match=r"none of \d+ users has 2 events"):
            read(path, min_events=2)
        return
    check(read(path, min_events=2, feature_columns=("rating",)), expected, "rating")


def _as_read_from_text(events: list[Event], min_events: int) -> list[Event]:
    kept = [event for own in reference(events, min_events).values() for event in own]

    def convert(field: str) -> dict[Any, Any]:
        values = {getattr(event, field) for event in kept}
        whole = all(str(value).isascii() and str(value).isdigit() and str(int(value)) == str(value) for value in values)
        return {getattr(e, field): int(getattr(e, field)) if whole else getattr(e, field) for e in kept}

    users, items = convert("user"), convert("item")
    return [e._replace(user=users.get(e.user, e.user), item=items.get(e.item, e.item)) for e in events]


def test_ids_that_are_not_plain_integers_stay_text(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "books.csv", [Event("7", isbn, at, 1) for at, isbn in enumerate(["0195", "195", "034X"])]
    )
    histories = read(path)
    assert histories.item_ids.tolist() == ["0195", "034X", "195"]
    assert histories.user_ids.tolist() == [7]


def test_numbers_written_differently_are_one_category(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "r.csv", [Event(1, at, at, value) for at, value in enumerate(["3", "3.0", "2.5"])])
    histories = read(path, feature_columns=("rating",))
    assert histories.feature_values["rating"].tolist() == [2.5, 3.0]
    assert histories.features["rating"].tolist() == [1, 1, 0]


def test_features_of_users_and_of_strings(tmp_path: Path) -> None:
    table = pa.table(
        {
            "items": [[1, 2, 3], [4, 5, 6]],
            "times": [[1, 2, 3], [1, 2, 3]],
            "country": ["fr", "de"],
            "vip": [True, False],
            "device": pa.array([["a", "b", "a"], ["b", "b", "b"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        }
    )
    pq.write_table(table, tmp_path / "data.parquet")
    histories = read(tmp_path / "data.parquet", feature_columns=("country", "vip", "device"))
    assert histories.user_ids.tolist() == [0, 1]  # without a user column the row is the user
    raw = {name: histories.feature_values[name][codes].tolist() for name, codes in histories.features.items()}
    assert raw == {
        "country": ["fr"] * 3 + ["de"] * 3,
        "vip": [True] * 3 + [False] * 3,
        "device": ["a", "b", "a", "b", "b", "b"],
    }


@pytest.mark.parametrize(
    ("times", "unit"),
    [
        (pa.array([2, 1, 0]), "s"),
        (pa.array([2900, 1500, 999]), "ms"),
        (pa.array([2.9, 1.5, 0.2]), "s"),
        (pa.array([2_900_000_000, 1_500_000_000, 1], pa.timestamp("ns")), "s"),
        (pa.array([datetime.fromtimestamp(t, UTC) for t in (2, 1, 0)], pa.timestamp("ms", "UTC")), "s"),
    ],
    ids=["int", "ms", "float", "timestamp_ns", "timestamp_ms"],
)
def test_times_become_seconds(tmp_path: Path, times: pa.Array, unit: Any) -> None:
    pq.write_table(pa.table({"user": [1, 1, 1], "item": [10, 11, 12], "time": times}), tmp_path / "data.parquet")
    histories = read(tmp_path / "data.parquet", time_unit=unit)
    assert histories.timestamps.tolist() == [0, 1, 2]
    assert histories.item_ids[histories.items].tolist() == [12, 11, 10]


def test_order_within_a_second_is_kept(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"user": [1, 1, 1], "item": [10, 11, 12], "time": [5900, 5100, 5500]}), tmp_path / "d.parquet"
    )
    histories = read(tmp_path / "d.parquet", time_unit="ms")
    assert histories.item_ids[histories.items].tolist() == [11, 12, 10]
    assert histories.timestamps.tolist() == [5, 5, 5]


def test_lists_of_fixed_size_and_names_with_dots(tmp_path: Path) -> None:
    pairs = {
        "seen.item": pa.array([[7, 8, 9], [9, 8, 8]], pa.list_(pa.int32(), 3)),
        "item": [0, 0],
        "at": [[1, 2, 3]] * 2,
    }
    pq.write_table(pa.table(pairs), tmp_path / "d.parquet")
    histories = read(tmp_path / "d.parquet", columns={"item": "seen.item", "time": "at"})
    assert histories.item_ids[histories.items].tolist() == [7, 8, 9, 9, 8, 8]


def test_named_columns_and_rows_in_time_order(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "d.csv", [Event("u", "b", 9), Event("u", "a", 1), Event("u", "c", 5)], ("who", "what", "at", "x")
    )
    histories = read(path, columns={"user": "who", "item": "what", "time": None})
    assert histories.item_ids[histories.items].tolist() == ["b", "a", "c"]
    assert histories.timestamps.tolist() == [0, 1, 2]


def test_users_with_few_events_and_their_items_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_csv(tmp_path / "few.csv", [Event(1, at, at) for at in range(3)] + [Event(2, 99, 1)])
    logger = logging.getLogger("lightning_freescale")
    logger.addHandler(caplog.handler)
    try:
        histories = read(path)
    finally:
        logger.removeHandler(caplog.handler)
    assert "few.csv: 1 of 2 users have fewer than 3 events and are left out" in caplog.text
    assert histories.user_ids.tolist() == [1]
    assert histories.item_ids.tolist() == [0, 1, 2]


def test_movielens(movielens: Path, tmp_path: Path) -> None:
    with movielens.open() as file:
        rows = [
            Event(int(r["userId"]), int(r["movieId"]), int(r["timestamp"]), float(r["rating"]))
            for r in csv.DictReader(file)
        ]
    (tmp_path / "ratings.csv").symlink_to(movielens)
    check(read(tmp_path / "ratings.csv", feature_columns=("rating",)), reference(rows), "rating")
