"""A model without tables trains as with ``ddp``, bit for bit, under every setting of the Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_freescale import BubbleMonitor, FreeScaleStrategy
from tests import toy
from tests.ranks import run_ranks

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gradient accumulation": {"accumulate_grad_batches": 2},
    "scheduled accumulation": {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 3})]},
    "weight averaging": {"callbacks": lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "clipping": {"gradient_clip_val": 0.01},
    "validation within an epoch": {"limit_val_batches": 2, "val_check_interval": 0.5},
}


class Dense(pl.LightningModule):
    """Has dropout and BatchNorm: random numbers and buffers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def data(size: int = 24) -> Any:
    samples = torch.randn(size, 4, generator=torch.Generator().manual_seed(7))
    return torch.utils.data.DataLoader(samples, batch_size=3, shuffle=True)


def fit(strategy: Any, options: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module = Dense()
    options = {name: value() if callable(value) else value for name, value in options.items()}
    trainer = toy.trainer(strategy, 2, **({"limit_val_batches": 1} | options))
    trainer.fit(module, data(), data(12))
    return {
        "losses": module.losses,
        "steps": trainer.global_step,
        "metrics": {name: value.clone() for name, value in trainer.callback_metrics.items()},
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
    }


def fit_both(rank: int) -> dict[str, list[dict[str, Any]]]:
    return {name: [fit(strategy, options) for strategy in ("ddp", "freescale")] for name, options in SETTINGS.items()}


def test_the_same_bits_as_with_ddp() -> None:
    for rank in run_ranks(fit_both, timeout=100):
        for name, (ddp, freescale) in rank.items():
            assert freescale["steps"] == ddp["steps"] > 0, name
            assert freescale["losses"] == ddp["losses"], name
            assert toy.same(freescale["metrics"], ddp["metrics"]), name
            assert toy.same(freescale["weights"], ddp["weights"]), name


# ---- options of DDP --------------------------------------------------------------------------------------------------
class Watched(pl.Callback):
    """Notes how DDP was set up."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        ddp = trainer.strategy.model
        assert isinstance(ddp, DistributedDataParallel)
        self.options = (
            ddp.find_unused_parameters,
            ddp.static_graph,
            ddp.bucket_bytes_cap,
            ddp.will_sync_module_buffers(),
        )


class PartlyUsed(toy.Model):
    """One layer has no part in the loss, which is an error of DDP without ``find_unused_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


def options_that_arrive(rank: int) -> list[Any]:
    found = []
    for module, train in ((Dense(), data()), (PartlyUsed(), toy.loader())):
        for options in ({"find_unused_parameters": True, "bucket_cap_mb": 2}, {"static_graph": True}):
            watched = Watched()
            strategy = FreeScaleStrategy(**options)
            module = type(module)()
            toy.trainer(strategy, 2, max_epochs=1, callbacks=[watched], limit_train_batches=3).fit(module, train)
            found.append(watched.options)
    return found


def test_options_of_ddp_arrive() -> None:
    for dense, static_dense, tables, static_tables in run_ranks(options_that_arrive):
        assert dense == (True, False, 2 << 20, True)
        assert static_dense[:2] == (False, True)
        assert tables == (True, False, 2 << 20, False)  # No buffer of the tables is broadcast.
        assert static_tables[:2] == (False, True)


class HookOnCpu(FreeScaleStrategy):
    """Lightning registers communication hooks on CUDA only. This class does the same on a CPU."""

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


def count_buckets(state: Any, bucket: Any) -> Any:
    state["buckets"] += 1
    return allreduce_hook(torch.distributed.group.WORLD, bucket)  # type: ignore[arg-type]


count_buckets.__annotations__.clear()  # DDP compares annotations with types, and these are strings.


def fit_with_hook(rank: int) -> list[tuple[int, int]]:
    found = []
    for module, train in ((Dense(), data()), (toy.Model(), toy.loader(16))):
        state = {"buckets": 0}
        for fit_number in range(2):
            strategy = HookOnCpu(ddp_comm_state=state, ddp_comm_hook=count_buckets)
            trainer = toy.trainer(strategy, 2, max_epochs=1)
            trainer.fit(module, train)
            found.append((state["buckets"], (fit_number + 1) * trainer.global_step))
    return found


def test_a_communication_hook_is_used_in_every_step_of_every_fit() -> None:
    for found in run_ranks(fit_with_hook):
        assert [buckets for buckets, _ in found] == [steps for _, steps in found]


class WithBatchNorm(toy.Model):
    """Notes the statistics of BatchNorm that each step starts with."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(len(toy.FEATURES) * toy.DIM)
        self.head = nn.Sequential(self.norm, *self.head)
        self.statistics: list[torch.Tensor] = []

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        assert self.norm.running_mean is not None
        self.statistics.append(self.norm.running_mean.clone())
        return super().training_step(batch, batch_idx)


def statistics_of_batch_norm(rank: int) -> list[list[torch.Tensor]]:
    pl.seed_everything(1, verbose=False)
    found = []
    for options in ({}, {"broadcast_buffers": False}):
        module = WithBatchNorm()
        strategy = FreeScaleStrategy(balance="off", **options)
        toy.trainer(strategy, 2, max_epochs=1).fit(module, toy.loader(64, batch_size=4))
        found.append(module.statistics)
    return found


def test_buffers_of_the_dense_part_are_those_of_rank_0_as_with_ddp() -> None:
    (first, first_own), (second, second_own) = run_ranks(statistics_of_batch_norm)
    assert len(first) == 8
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(first_own[1:], second_own[1:], strict=True))


# ---- the monitor -----------------------------------------------------------------------------------------------------
class LoggerWithoutFolder(Logger):
    """Keeps its values in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[int, set[str]]] = []

    name, version = "memory", 3

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.values.append((step, set(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def monitored(rank: int) -> dict[str, Any]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_freescale").addHandler(handler)
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"log_every_n_steps": 2, "default_root_dir": "root"}
    for name, module, train, more in (
        ("tables", toy.Model(), toy.loader(64), {}),
        ("plain", Dense(), data(48), {}),
        ("accumulated", Dense(), data(48), {"callbacks": [BubbleMonitor()], "accumulate_grad_batches": 2}),
    ):
        logger = LoggerWithoutFolder()
        toy.trainer("freescale", 2, max_epochs=1, logger=logger, **options, **more).fit(module, train)
        found[name] = [step for step, metrics in logger.values if "bubble/total" in metrics]
    found["files"] = sorted(str(path) for path in Path().rglob("*rank*"))
    found["messages"] = [message for message in messages if "no folder" in message]
    return found


def test_the_monitor_without_a_folder_and_with_accumulation() -> None:
    first, second = run_ranks(monitored)
    assert first["tables"] == second["tables"] == [1, 3, 5, 7, 9, 11, 13, 15]
    assert first["plain"] == []  # Plain DDP is measured only if the user asks for it.
    assert first["accumulated"] == [0, 1, 2, 3]  # Two batches are one optimizer step.
    assert not Path("freescale").exists()
    assert {str(Path(path).parent) for path in first["files"]} == {"root/memory/version_3/freescale"}
    assert len(first["messages"]) == 1
    assert "root/memory/version_3" in first["messages"][0]


def logged_by(rank: int, strategy: str) -> str:
    logger = CSVLogger(f"logs_{strategy}")
    pl.seed_everything(1, verbose=False)
    toy.trainer(strategy, 2, max_epochs=1, logger=logger, log_every_n_steps=1, limit_val_batches=1).fit(
        Dense(), data(), data(12)
    )
    return Path(logger.log_dir, "metrics.csv").read_text() if rank == 0 else ""


def test_the_file_of_a_csv_logger_is_the_same() -> None:
    ddp, freescale = (run_ranks(logged_by, args=(strategy,))[0] for strategy in ("ddp", "freescale"))
    assert ddp.count("\n") > 4
    assert freescale == ddp
