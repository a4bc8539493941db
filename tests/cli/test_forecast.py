"""``freescale plan --link-gbps --gpus``, run as a command."""

from __future__ import annotations

import json

import pytest

from lightning_freescale.cli import main as cli

DATA = ["plan", "synthetic", "--synthetic", "users=400", "--ranks", "2", "--batch-size", "8", "--max-history", "500"]
LINK = ["--link-gbps", "200", "--gpus", "4,16"]


def simulated(capsys: pytest.CaptureFixture[str], *options: str) -> dict[tuple[int, str], dict]:
    assert cli.main([*DATA, *LINK, "--json", *options]) == 0
    return {(row["ranks"], row["side"]): row for row in json.loads(capsys.readouterr().out)["simulated"]}


def test_the_table_comes_after_the_table_of_balancing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(DATA) == 0
    plain = capsys.readouterr().out
    assert cli.main([*DATA, *LINK]) == 0
    table = capsys.readouterr().out
    assert table.startswith(plain)
    lines = [line.split() for line in table.removeprefix(plain).splitlines()]
    assert [line[0] for line in lines if "TorchRec" in line and "SparseDist" not in line] == ["4", "16"]
    assert sum("FreeScale" in line for line in lines) == 2


def test_the_json_is_a_plain_list_without_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*DATA, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert cli.main([*DATA, *LINK, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert isinstance(before, list)
    assert after["balance"] == before
    for row in after["simulated"]:
        assert row["bubble"] == pytest.approx(row["step"] - row["compute"])


def test_freescale_has_a_smaller_bubble_and_the_same_compute(capsys: pytest.CaptureFixture[str]) -> None:
    rows = simulated(capsys)
    for gpus in (4, 16):
        torchrec, freescale = rows[gpus, "TorchRec"], rows[gpus, "FreeScale"]
        assert freescale["bubble"] < torchrec["bubble"]
        assert freescale["compute"] == pytest.approx(torchrec["compute"])
        assert freescale["qps"] > torchrec["qps"]


def test_compute_ms_and_link_gbps_scale_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    rows = simulated(capsys, "--compute-ms", "40")
    assert rows[16, "TorchRec"]["compute"] == pytest.approx(
        0.040, rel=0.15
    )  # --compute-ms is for the mean history, and these batches differ from it
    slow = simulated(capsys, "--compute-ms", "40", "--link-gbps", "20")
    fast_part, slow_part = (found[16, "TorchRec"]["parts"]["exposed_embedding"] for found in (rows, slow))
    assert slow_part == pytest.approx(10 * fast_part, rel=0.1)  # except for the latency
    all_collide = simulated(capsys, "--compute-ms", "40", "--collisions", "100")
    assert all_collide[16, "FreeScale"]["bubble"] > rows[16, "FreeScale"]["bubble"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "8"], "--link-gbps: is missing; --link-gbps and --gpus are needed together"),
        (["--link-gbps", "8"], "--gpus: is missing; --link-gbps and --gpus are needed together"),
        (["--link-gbps", "0", "--gpus", "8"], "--link-gbps: must be positive, not 0"),
        ([*LINK, "--compute-ms", "-1"], "--compute-ms: must be positive, not -1"),
        ([*LINK, "--collisions", "120"], "collisions: 1.2 must be a share"),
        ([*LINK, "--nccl-slowdown", "0.5"], "nccl_slowdown: 0.5 must be finite and at least 1"),
    ],
)
def test_error_messages(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*DATA, *options]) == 1
    assert message in capsys.readouterr().err
