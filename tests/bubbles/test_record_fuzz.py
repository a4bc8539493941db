"""Record files with damaged fields: ``freescale report`` names the file, the line and the field, or reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_freescale.bubbles.analysis import analyse
from lightning_freescale.bubbles.record_checks import problem_of
from lightning_freescale.bubbles.records import rank_file, read_run
from lightning_freescale.cli import report
from lightning_freescale.runtime.errors import InputError
from tests.bubbles.synthetic_runs import write_run

WRONG = st.sampled_from([None, True, -1, 0.5, 1e400, "text", "\x00", [], [[]], {}, {"a": []}, [None], 2**70])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, part in items for found in places(part, (*path, key))]


def replaced(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    copied = json.loads(json.dumps(value))
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = wrong
    return copied


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_field_is_named(tmp_path: Path, data: st.DataObject) -> None:
    for file in (tmp_path / "freescale").glob("*.jsonl"):
        file.unlink()
    write_run(tmp_path, [(10.0, 20.0)] * 3)
    path = rank_file(tmp_path, 1)
    lines = path.read_text().splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    record = json.loads(lines[number])
    lines[number] = json.dumps(replaced(record, data.draw(st.sampled_from(places(record))), data.draw(WRONG)))
    path.write_text("\n".join(lines))
    message = str(tmp_path)
    try:
        report.describe(analyse(read_run(tmp_path)))
    except InputError as error:
        message = str(error)
    assert str(tmp_path) in message


@pytest.mark.parametrize("line", ["5", "null", '"text"', "[]", "{}", '{"step": 1}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    write_run(tmp_path, [(10.0, 20.0)] * 2)
    path = rank_file(tmp_path, 0)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InputError, match=r"rank_00000\.jsonl: line 4"):
        read_run(tmp_path)


def test_what_the_monitor_writes_is_right(tmp_path: Path) -> None:
    write_run(tmp_path, [(10.0, 20.0)])
    assert [problem_of(json.loads(line)) for line in rank_file(tmp_path, 0).read_text().splitlines()] == [None, None]
