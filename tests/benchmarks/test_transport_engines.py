"""The comparison of engines of ``benchmarks.transport``: its rows, and names that it does not know."""

from __future__ import annotations

import sys

import pytest

from benchmarks import transport
from lightning_freescale.transport.engine_timing import EngineTime


def test_a_row_has_the_middle_and_the_range_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([1.0, 5.0, 2.0])

    def times(device: str, ranks: int, mebibytes: int) -> list[EngineTime]:
        rate = next(rates)
        return [EngineTime("gloo", rate, 100 * rate), EngineTime("peer copies", problem="no peer")]

    monkeypatch.setattr(transport, "time_engines", times)
    first, second = transport.compare_engines("cpu", 2, ["gloo", "peer copies"], rounds=3, mebibytes=1)
    assert (first["engine"], first["GB/s"], first["GB/s range"]) == ("gloo", 2.0, "1.00 - 5.00")
    assert (first["us a small exchange"], first["us range"], first["cannot run"]) == (200.0, "100 - 500", "")
    assert (second["engine"], second["GB/s"], second["cannot run"]) == ("peer copies", "", "no peer")
    assert first.keys() == second.keys()


def test_an_unknown_engine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["transport", "--engines", "pigeons", "--device", "cpu"])
    with pytest.raises(SystemExit, match="no engine 'pigeons' for cpu; use 'all', 'gloo', 'host staging'"):
        transport.main()
