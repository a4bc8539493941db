"""The strategy in the configuration file of a ``LightningCLI``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_freescale import FreeScaleStrategy, SeqRecDataModule
from tests import toy
from tests.ranks import run_ranks

pytest.importorskip("jsonargparse")
from lightning.pytorch.cli import LightningCLI

CONFIGURATION = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  max_epochs: 1
  limit_val_batches: 0
  strategy: {strategy}
model:
  lr: 0.02
"""
CLASS = """
    class_path: lightning_freescale.FreeScaleStrategy
    init_args:
      sharding: table_wise
      embedding_optimizer: {optimizer: sgd, lr: 0.1}
      balance: "off"
      timeout: 30
"""
WITH_DDP_OPTIONS = CLASS + "      find_unused_parameters: true\n      bucket_cap_mb: 3\n"
PLAIN_OFF = CLASS.replace('"off"', "off")  # which YAML reads as False
PLAIN_ON = CLASS.replace('"off"', "on")
DEFAULTS = "{class_path: lightning_freescale.FreeScaleStrategy}"


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return toy.loader(16)


def fit_by_file(rank: int, strategy: str) -> tuple[FreeScaleStrategy, toy.Model]:
    path = Path(f"configuration_{rank}.yaml")
    path.write_text(CONFIGURATION.replace("{strategy}", strategy))
    cli = LightningCLI(toy.Model, Data, save_config_callback=None, args=["fit", "--config", str(path)])
    assert isinstance(cli.trainer.strategy, FreeScaleStrategy)
    assert cli.trainer.global_step == 4
    return cli.trainer.strategy, cli.model


def fit_by_script(strategy: FreeScaleStrategy) -> toy.Model:
    pl.seed_everything(1, verbose=False)
    module = toy.Model(lr=0.02)
    toy.trainer(strategy, 2, max_epochs=1).fit(module, Data())
    return module


def compare(rank: int) -> None:
    options: dict[str, Any] = {"sharding": "table_wise", "embedding_optimizer": {"optimizer": "sgd", "lr": 0.1}}
    for text, strategy in (
        ("freescale", FreeScaleStrategy()),
        (DEFAULTS, FreeScaleStrategy()),
        (CLASS, FreeScaleStrategy(**options, balance="off")),
        (PLAIN_OFF, FreeScaleStrategy(**options, balance="off")),
        (CLASS, FreeScaleStrategy(**options, balance=False)),
    ):
        _, by_file = fit_by_file(rank, text)
        assert toy.same(toy.weights(by_file), toy.weights(fit_by_script(strategy))), text
    strategy, module = fit_by_file(rank, WITH_DDP_OPTIONS)
    sharded = module._freescale.sharded
    assert isinstance(sharded, torch.nn.Module)
    ddp = sharded._dmp_wrapped_module
    assert ddp.find_unused_parameters
    assert ddp.bucket_bytes_cap == 3 << 20


def test_a_configuration_file_trains_as_a_script() -> None:
    run_ranks(compare)


def parse(text: str, folder: Path) -> Any:
    path = folder / "configuration.yaml"
    path.write_text(text)
    return LightningCLI(toy.Model, SeqRecDataModule, save_config_callback=None, run=False, args=["--config", str(path)])


def test_a_plain_off_turns_the_balancing_of_the_data_module_off(tmp_path: Path) -> None:
    data = parse("data: {batch_size: 2, max_history: 8, balance: off}", tmp_path).datamodule
    assert (data.planner, data.follows_strategy) == (None, False)


@pytest.mark.parametrize(
    "text",
    [
        CONFIGURATION.replace("{strategy}", PLAIN_ON) + "data: {batch_size: 2, max_history: 8}\n",
        "data: {batch_size: 2, max_history: 8, balance: on}",
    ],
    ids=["strategy", "data module"],
)
def test_a_plain_on_names_no_mode_of_balancing(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"balance=True does not name a mode.*'fixed'"):
        parse(text, tmp_path)
