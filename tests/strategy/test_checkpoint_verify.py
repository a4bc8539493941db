"""``freescale verify`` and ``fs.last_checkpoint``: damage is found, and an older checkpoint serves instead."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import lightning_freescale as fs
from lightning_freescale.cli import main as cli
from lightning_freescale.strategy.checkpoints.verify import verify
from tests.ranks import run_ranks
from tests.strategy.test_checkpoint import fit


@pytest.fixture(scope="module", params=["file", "sharded"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    run_ranks(fit, args=(2, str(folder), None, {"max_steps": 10}, {"checkpoint": request.param}))
    return folder


@pytest.fixture
def copies(checkpoints: Path, tmp_path: Path) -> list[Path]:
    """The checkpoints of steps 5 and 10."""
    shutil.copytree(checkpoints, tmp_path / "run")
    found = [tmp_path / "run" / f"epoch=0-step={step}.ckpt" for step in (5, 10)]
    for seconds, path in enumerate(found):
        os.utime(path, (1_000 + seconds, 1_000 + seconds))
    return found


def damage(checkpoint: Path) -> None:
    """Change one byte of the checkpoint, in its largest file, without a change of its times."""
    file = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size) if checkpoint.is_dir() else checkpoint
    times = os.stat(checkpoint)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(checkpoint, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_verify_names_the_step_and_the_damage(copies: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert [(found.step, found.epoch) for found in map(verify, copies)] == [(5, 0), (10, 0)]
    assert cli.main(["verify", *map(str, copies)]) == 0
    assert "step 10, epoch 0" in capsys.readouterr().out
    damage(copies[1])
    assert cli.main(["verify", *map(str, copies)]) == 1
    shown = capsys.readouterr()
    assert "step 5, epoch 0" in shown.out
    assert f"{copies[1]} is damaged" in shown.err


def test_the_last_undamaged_checkpoint_is_found(copies: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = copies[0].parent
    assert fs.last_checkpoint(folder) == str(copies[1])
    damage(copies[1])
    assert fs.last_checkpoint(folder) == str(copies[0])
    assert f"{copies[1]} is not used" in caplog.text
    damage(copies[0])
    assert fs.last_checkpoint(folder) is None
    assert fs.last_checkpoint(folder / "missing") is None


def test_a_checkpoint_that_was_set_aside_is_found(copies: list[Path]) -> None:
    """A crash while the new one is put into its place leaves the old one under another name."""
    copies[1].rename(copies[1].with_name(f".{copies[1].name}.previous"))
    found = fs.last_checkpoint(copies[0].parent)
    assert found is not None
    assert verify(found).step == 10
