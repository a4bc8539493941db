"""``freescale plan --link-gbps --gpus``: through the command."""

from __future__ import annotations

import json

import pytest

from lightning_freescale.cli.main import main as cli

DATA = ["plan", "synthetic", "--synthetic", "users=400", "--ranks", "2", "--batch-size", "8", "--max-history", "500"]
LINK = ["--link-gbps", "200", "--gpus", "4,16"]


def expected(capsys: pytest.CaptureFixture[str], *options: str) -> dict[tuple[int, str], dict]:
    assert cli.main([*DATA, *LINK, "--json", *options]) == 0
    return {(row["ranks"], row["side"]): row for row in json.loads(capsys.readouterr().out)["simulated"]}


def test_the_table_follows_that_of_balancing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(DATA) == 0
    plain = capsys.readouterr().out
    assert cli.main([*DATA, *LINK]) == 0
    table = capsys.readouterr().out
    assert table.startswith(plain)
    lines = [line.split() for line in table.removeprefix(plain).splitlines()]
    assert [line[0] for line in lines if "TorchRec" in line and "SparseDist" not in line] == ["4", "16"]
    assert sum("FreeScale" in line for line in lines) == 2


def test_json_is_as_before_without_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*DATA, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert cli.main([*DATA, *LINK, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert isinstance(before, list)
    assert after["balance"] == before
    for row in after["simulated"]:
        assert row["bubble"] == pytest.approx(row["step"] - row["compute"])


def test_freescale_has_the_smaller_bubble_and_both_the_same_compute(capsys: pytest.CaptureFixture[str]) -> None:
    rows = expected(capsys)
    for gpus in (4, 16):
        torchrec, freescale = rows[gpus, "TorchRec"], rows[gpus, "FreeScale"]
        assert freescale["bubble"] < torchrec["bubble"]
        assert freescale["compute"] == pytest.approx(torchrec["compute"])
        assert freescale["qps"] > torchrec["qps"]


def test_measured_compute_and_the_link_are_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    rows = expected(capsys, "--compute-ms", "40")
    assert rows[16, "TorchRec"]["compute"] == pytest.approx(
        0.040, rel=0.15
    )  # of the mean history, not of these batches
    slow = expected(capsys, "--compute-ms", "40", "--link-gbps", "20")
    fast_part, slow_part = (found[16, "TorchRec"]["parts"]["exposed_embedding"] for found in (rows, slow))
    assert slow_part == pytest.approx(10 * fast_part, rel=0.1)  # but for the latency
    all_collide = expected(capsys, "--compute-ms", "40", "--collisions", "100")
    assert all_collide[16, "FreeScale"]["bubble"] > rows[16, "FreeScale"]["bubble"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "8"], "--link-gbps: --link-gbps and --gpus are needed together"),
        (["--link-gbps", "8"], "--gpus: --link-gbps and --gpus are needed together"),
        (["--link-gbps", "0", "--gpus", "8"], "--link-gbps: must be positive, not 0"),
        ([*LINK, "--compute-ms", "-1"], "--compute-ms: must be positive, not -1"),
        ([*LINK, "--collisions", "120"], "collisions: 1.2 must be a share"),
        ([*LINK, "--nccl-slowdown", "0.5"], "nccl_slowdown: 0.5 must be finite and at least 1"),
    ],
)
def test_what_is_wrong_is_said(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*DATA, *options]) == 1
    assert message in capsys.readouterr().err
