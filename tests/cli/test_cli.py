"""The ``freescale`` command: output, exit codes, and that ``--help`` imports no large package."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import pytest
import torch

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.cli import main as cli
from tests import toy
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
# Runs the command like its console script, then prints which large packages it has imported.
START = """
import sys, lightning_freescale_cli
try:
    lightning_freescale_cli.main()
finally:
    print({"torch", "lightning", "lightning_freescale"} & set(sys.modules), file=sys.stderr)
"""


def freescale(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(option: str) -> None:
    done = freescale(option)
    assert done.returncode == 0
    assert done.stderr.strip() == "set()"
    for expected in cli.COMMANDS if option == "--help" else [f"torch {torch.__version__}", "torchrec ", "lightning "]:
        assert expected in done.stdout


def test_a_subcommand_imports_the_package() -> None:
    done = freescale("export", "missing.ckpt", "out.pt")
    assert "freescale export: error: Checkpoint file not found: missing.ckpt" in done.stderr
    assert "lightning_freescale" in done.stderr.splitlines()[-1]  # START detects imports


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["exprot"])
    assert exit_.value.code == 2
    assert "'exprot'" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, function = cli.COMMANDS[name].main.split(":")
    assert "prog" in inspect.signature(getattr(import_module(module), function)).parameters
    with pytest.raises(SystemExit) as exit_:
        cli.main([name, "--help"])
    assert exit_.value.code == 0
    assert f"usage: freescale {name}" in capsys.readouterr().out


def save(rank: int, path: str, checkpoint: Literal["file", "sharded"]) -> dict[str, torch.Tensor]:
    """Train for three steps, save a checkpoint, and return the weights."""
    pl.seed_everything(1, verbose=False)
    model = toy.Model()
    trainer = toy.trainer(FreeScaleStrategy(checkpoint=checkpoint), 2, max_steps=3)
    trainer.fit(model, toy.loader())
    trainer.save_checkpoint(path)
    return toy.weights(model)


@pytest.mark.parametrize("format_", ["file", "sharded"])
def test_export(format_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, output = tmp_path / "toy.ckpt", tmp_path / "new folder" / "toy.pt"
    saved = run_ranks(save, args=(str(checkpoint), format_))[0]
    assert cli.main(["export", str(checkpoint), str(output)]) == 0
    model = toy.Model()
    assert not toy.same(dict(model.state_dict()), saved)
    model.load_state_dict(torch.load(output, weights_only=True))
    assert toy.same(dict(model.state_dict()), saved)
    weights = sum(value.numel() for value in saved.values())
    assert capsys.readouterr().out == f"{output}: {len(saved)} tensors, {weights:,} weights\n"


def test_export_of_a_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, output = tmp_path / "toy.ckpt", tmp_path / "toy.pt"
    run_ranks(save, args=(str(checkpoint), "sharded"))
    (checkpoint / ".metadata").unlink()
    assert cli.main(["export", str(checkpoint), str(output)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"freescale export: error: {checkpoint} is damaged: .metadata")
    assert not output.exists()


def test_demo_on_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--accelerator", "cpu", "--data", str(tmp_path / "missing.csv")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("freescale demo: error: ")
    assert "missing.csv" in error
