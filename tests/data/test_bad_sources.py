"""Files that cannot be read are errors that name the file, the row and the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_freescale.data.sources import open_source
from lightning_freescale.runtime.errors import ConfigurationError, InputError
from tests.data.reference import Event, random_events
from tests.data.test_sources import read, write_csv, write_events

GOOD = [Event(1, at, at, 1.0) for at in range(3)]


def test_missing_column(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "d.csv", GOOD)
    with pytest.raises(InputError, match=r"d\.csv: no column 'stars' \(columns: userId, movieId, timestamp, rating\)"):
        read(path, feature_columns=("stars",))


def test_missing_role(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "d.csv", GOOD, ("userId", "movieId", "when", "rating"))
    with pytest.raises(
        InputError, match=r"d\.csv: no column has a usual name of the time.*columns: userId, movieId, when, rating"
    ):
        read(path)


def test_ambiguous_role(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "d.csv", GOOD, ("userId", "movieId", "timestamp", "time"))
    with pytest.raises(InputError, match=r"\['timestamp', 'time'\] could each be the time"):
        read(path)


def test_unknown_role(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'usr' is not a role"):
        read(write_csv(tmp_path / "d.csv", GOOD), columns={"usr": "userId"})


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.csv does not exist"):
        read(tmp_path / "nothing.csv")


def test_unknown_suffix_and_format(tmp_path: Path) -> None:
    (tmp_path / "d.dat").touch()
    with pytest.raises(InputError, match="tells no known format"):
        open_source(tmp_path / "d.dat")
    with pytest.raises(ConfigurationError, match="'xls' is unknown"):
        open_source(tmp_path / "d.dat", format="xls")


@pytest.mark.parametrize("name", ["d.parquet", "d.csv", "d.txt"])
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00 \xff\n\xff", b"PAR1 and then nothing"], ids=["empty", "binary", "cut"]
)
def test_corrupt_file(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        read(tmp_path / name)


def test_parquet_cut_in_the_middle(tmp_path: Path) -> None:
    path = write_events(tmp_path / "d.parquet", random_events(np.random.default_rng(0), 10_000))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(InputError, match=r"d\.parquet: cannot be read"):
        read(path)


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no \.parquet file"):
        read(tmp_path / "empty")


def test_header_without_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no events"):
        read(write_csv(tmp_path / "d.csv", []))


def test_row_of_another_width(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("userId,movieId,timestamp\n1,2,3\n1,2\n")
    with pytest.raises(InputError, match=r"d\.csv: cannot be read: .*Expected 3 columns, got 2"):
        read(tmp_path / "d.csv")


@pytest.mark.parametrize("column", ["user", "item", "time", "rating"])
def test_null(tmp_path: Path, column: str) -> None:
    table = {"user": [1, 1, 1], "item": [1, 2, 3], "time": [1, 2, 3], "rating": [0.5, 1.0, 1.5]}
    table[column][1] = None  # type: ignore[index,call-overload]
    pq.write_table(pa.table(table), tmp_path / "d.parquet")
    with pytest.raises(InputError, match=rf"d\.parquet: {column} is null at row 1"):
        read(tmp_path / "d.parquet", feature_columns=("rating",))


def test_empty_cell(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("userId,movieId,timestamp\n1,2,3\n1,,4\n")
    with pytest.raises(InputError, match=r"d\.csv: movieId is null at row 1"):
        read(tmp_path / "d.csv")


@pytest.mark.parametrize("column", ["user", "item", "time"])
def test_negative(tmp_path: Path, column: str) -> None:
    table = {"user": [1, 1, 1], "item": [1, 2, 3], "time": [1, 2, 3]}
    table[column][2] = -4
    pq.write_table(pa.table(table), tmp_path / "d.parquet")
    with pytest.raises(InputError, match=rf"d\.parquet: {column} is -4 at row 2"):
        read(tmp_path / "d.parquet")


def test_negative_in_text(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("1 2\n1 -4\n1 3\n")
    with pytest.raises(InputError, match=r"d\.txt: item is -4"):
        read(tmp_path / "d.txt")


def test_nan_and_huge_times(tmp_path: Path) -> None:
    for value in (float("nan"), 1e300):
        pq.write_table(pa.table({"user": [1, 1], "item": [1, 2], "time": [1.0, value]}), tmp_path / "d.parquet")
        with pytest.raises(InputError, match=r"time is (nan|1e\+300) at row 1"):
            next(open_source(tmp_path / "d.parquet").events())


@pytest.mark.parametrize(("unit", "milliseconds"), [("s", 1), ("ms", 1000)])
def test_times_of_a_finer_unit(tmp_path: Path, unit: str, milliseconds: int) -> None:
    """Milliseconds that are read as seconds would be in a year after 50000."""
    times = [1_600_000_000_000 * milliseconds + at for at in range(3)]
    pq.write_table(pa.table({"user": [1] * 3, "item": [1, 2, 3], "time": times}), tmp_path / "d.parquet")
    with pytest.raises(InputError, match=rf"time is {times[0]} at row 0; .*before the year 10000; set time_unit"):
        read(tmp_path / "d.parquet", time_unit=unit)


def test_time_of_type_string(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("userId,movieId,timestamp\n1,2,soon\n")
    with pytest.raises(InputError, match=r"'timestamp' has type string; .* not 'soon'"):
        read(tmp_path / "d.csv")


def test_float_ids(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": [1.0], "item": [1], "time": [1]}), tmp_path / "d.parquet")
    with pytest.raises(InputError, match="'user' has type double; ids must be integers or strings"):
        read(tmp_path / "d.parquet")


def test_lists_of_unequal_length(tmp_path: Path) -> None:
    pq.write_table(pa.table({"items": [[1, 2, 3], [4, 5]], "times": [[1, 2, 3], [4]]}), tmp_path / "d.parquet")
    with pytest.raises(InputError, match=r"d\.parquet: times has 1 elements at row 1, items has 2"):
        read(tmp_path / "d.parquet")


def test_null_within_a_list(tmp_path: Path) -> None:
    pq.write_table(pa.table({"items": [[1, 2], [3, None]], "times": [[1, 2], [3, 4]]}), tmp_path / "d.parquet")
    with pytest.raises(InputError, match=r"d\.parquet: items is null at row 1"):
        read(tmp_path / "d.parquet")


def test_time_without_lists(tmp_path: Path) -> None:
    pq.write_table(pa.table({"items": [[1, 2, 3]], "time": [1]}), tmp_path / "d.parquet")
    with pytest.raises(InputError, match="'time' has type int64, but 'items' has lists"):
        read(tmp_path / "d.parquet")


def test_line_that_is_not_a_pair(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("1 2\n\n1 2 3\n")
    with pytest.raises(InputError, match=r"d\.txt: line 3 is '1 2 3'; each line needs a user and an item"):
        read(tmp_path / "d.txt")


def test_no_user_left(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none of 1 users has 5 events or more"):
        read(write_csv(tmp_path / "d.csv", GOOD), min_events=5)


def test_types_that_change_between_files(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    write_events(tmp_path / "d" / "0.parquet", GOOD)
    write_events(tmp_path / "d" / "1.parquet", [event._replace(item=f"i{event.item}") for event in GOOD])
    with pytest.raises(InputError, match="item: int64 first, large_string in a later part or file"):
        read(tmp_path / "d")


@pytest.mark.parametrize("names", [("history",), ("rating", "rating")])
def test_feature_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="feature_columns"):
        open_source(write_csv(tmp_path / "d.csv", GOOD), feature_columns=names)
