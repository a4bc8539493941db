"""The launcher of ``benchmarks.end_to_end``: its options, variants that fail, and a process that is told to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import end_to_end
from benchmarks.harness.gpu_cluster.rank_process import ClusterFailed
from benchmarks.harness.variant_names import ALL, BALANCE, SYNC
from tests.benchmarks.test_end_to_end import QUICK


def test_a_failed_variant_is_recorded_and_other_failures_are_not(tmp_path: Path) -> None:
    part, failure = tmp_path / "part.json", ClusterFailed("rank 1 ended with status 1:\n...\nRuntimeError: no luck", 1)
    assert not end_to_end._note_failure(part, failure)  # before the first variant
    part.write_text(json.dumps({"under_way": SYNC, "failed": {}}))
    assert end_to_end._note_failure(part, failure)
    assert json.loads(part.read_text())["failed"] == {SYNC: "RuntimeError: no luck"}
    assert not end_to_end._note_failure(part, failure)  # no variant was running: another attempt would not help


def test_complete_rounds_are_written_if_the_process_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.json"
    sides = {"wanted": [SYNC, ALL, BALANCE], "failed": {BALANCE: "no luck"}}
    known = sides | {"sides": {SYNC: 1, ALL: 2}, "later_rounds": [{SYNC: 3, ALL: 4}, {SYNC: 5}]}

    def stopped(ranks: int, argv: list[str], *rest: Any, **options: Any) -> None:
        Path(argv[argv.index("--part") + 1]).write_text(json.dumps(known))
        raise SystemExit(143)

    monkeypatch.setattr(end_to_end.launcher, "run", stopped)
    monkeypatch.setattr(end_to_end, "finish", lambda figures: figures)
    monkeypatch.setattr(end_to_end, "publish", lambda figures, arguments: output.write_text(json.dumps(figures)))
    monkeypatch.setattr("sys.argv", ["end_to_end"])
    arguments = end_to_end.parse(["--device", "cpu", "--ranks", "2"])
    with pytest.raises(SystemExit) as caught:
        end_to_end.launch(arguments)
    assert caught.value.code == 143
    found = json.loads(output.read_text())
    assert found["later_rounds"] == [{SYNC: 3, ALL: 4}]
    assert found["stopped"] == "after 2 of 3 rounds"

    output.unlink()
    known = sides | {"sides": {SYNC: 1}, "later_rounds": [{}]}  # the first round is not complete
    with pytest.raises(SystemExit):
        end_to_end.launch(arguments)
    assert not output.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sides", "magic"], "no variant 'magic'"),
        (["--shapes", "round"], "no shape 'round'"),
        (["--rounds", "0"], "--rounds: 0 is less than 1"),
        (["--strict", "--warm-up", "6"], "--strict needs more than 6 steps"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        end_to_end.parse([*QUICK, *words])
    assert message in capsys.readouterr().err
