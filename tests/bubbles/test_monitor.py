"""The monitor in a Trainer: what it logs, where and when, and that training stays the same."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lightning_freescale.pytorch_lightning as other_namespace
from lightning_freescale import ConfigurationError
from lightning_freescale.bubbles import overhead, picture
from lightning_freescale.bubbles.monitor import BubbleMonitor, BubbleMonitorMixin, add_monitor
from lightning_freescale.bubbles.records import read_run
from lightning_freescale.bubbles.summary import MORE_TAGS, TAGS
from lightning_freescale.models import HSTU
from tests import toy
from tests.bubbles.monitored_fit import SynchronousStrategy, fit
from tests.ranks import RankFailed, run_ranks

PARTS = [tag for tag in TAGS if tag.startswith("bubble/") and tag != "bubble/total"]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """``{tag: {step: value}}`` of all event files in a folder, read with TensorBoard's reader."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


# ---- TensorBoard ---------------------------------------------------------------------------------------------------
def fit_and_resume(rank: int, folder: Path, world: int) -> None:
    def logger() -> TensorBoardLogger:
        return TensorBoardLogger(folder, name="", version="run")

    options: dict[str, Any] = {"log_every_n_steps": 4, "max_epochs": -1}
    trainer = fit(world, logger=logger(), max_steps=10, **options)
    trainer.save_checkpoint(folder / "half")
    model = toy.Model()
    trainer = toy.trainer(
        SynchronousStrategy(), world, logger=logger(), max_steps=19, callbacks=[BubbleMonitor()], **options
    )
    trainer.fit(model, toy.loader(), ckpt_path=folder / "half")
    assert trainer.global_step == 19


@pytest.mark.parametrize("world", [1, 2])
def test_every_tag_is_in_the_event_files_also_after_a_resume(world: int, tmp_path: Path) -> None:
    run_ranks(fit_and_resume, world, args=(tmp_path, world))
    found = scalars(tmp_path / "run")
    # Intervals end at 3, 7, 11, ... The last interval of each fit is shorter: it ends at 9 and at 18.
    expected = {3, 7, 9, 11, 15, 18}
    for tag in TAGS:
        assert set(found[tag]) == expected, tag
        assert all(math.isfinite(value) for value in found[tag].values()), tag
    assert set(found) - {"epoch", "hp_metric"} <= {*TAGS, *MORE_TAGS}
    for step in expected:
        total = found["bubble/total"][step]
        assert 0 < total < 1
        assert sum(found[part][step] for part in PARTS) == pytest.approx(total, abs=1e-3)
        assert found["step/time_ms"][step] > 0
        assert found["balance/imbalance"][step] >= 1
        assert 0 <= found["balance/sparsity"][step] < 1
        assert 0 <= found["comm/overlap"][step] <= 1
        assert found["throughput/tokens_per_s"][step] > found["throughput/samples_per_s"][step] > 0
    assert any(0 < value < 1 for value in found["embedding/collision_rate"].values())
    run = read_run(tmp_path / "run")
    assert run.ranks == world
    # The first step of a fit is not recorded, because it includes the setup.
    assert run.indices == [*range(1, 10), *range(11, 19)]


def fit_with_images(rank: int, folder: Path, pillow: bool) -> None:
    if not pillow:
        picture.available = lambda: False
    fit(
        2,
        logger=TensorBoardLogger(folder, name="", version="run"),
        log_every_n_steps=4,
        max_epochs=1,
        monitor=BubbleMonitor(1, 8),
    )


def test_pictures_of_the_timeline(tmp_path: Path) -> None:
    run_ranks(fit_with_images, args=(tmp_path, True))
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"images": 0})
    events.Reload()
    images = events.Images("bubble/timeline")
    assert [image.step for image in images] == [3, 11]
    assert all(image.width == 1200 and image.height > 80 for image in images)


def test_without_pillow_the_metrics_are_still_logged(tmp_path: Path) -> None:
    run_ranks(fit_with_images, args=(tmp_path, False))
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert events.Tags()["images"] == []
    assert set(TAGS) <= set(events.Tags()["scalars"])


# ---- other loggers, the progress bar -------------------------------------------------------------------------------
class Remembering(Logger):
    """A custom logger that has only the two methods that Lightning requires."""

    name, version = "remembering", 0

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.logged.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def fit_other_loggers(rank: int, folder: Path) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
    logger = Remembering()
    trainer = fit(2, logger=[logger, CSVLogger(folder, name="", version="")], log_every_n_steps=5, max_epochs=1)
    return logger.logged, {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


def test_any_logger_and_the_progress_bar(tmp_path: Path) -> None:
    (logged, bar), (_, other_bar) = run_ranks(fit_other_loggers, args=(tmp_path,))
    assert sorted(logged) == [4, 9, 14, 15]
    assert all(set(TAGS) <= set(values) for values in logged.values())
    assert 0 < bar["bubble"] < 1
    assert bar == other_bar  # every rank has the figures of all ranks
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {int(row["step"]): float(row["bubble/total"]) for row in rows} == {
        step: pytest.approx(values["bubble/total"]) for step, values in logged.items()
    }


# ---- training stays the same ----------------------------------------------------------------------------------------
def train(rank: int, world: int, monitored: bool, bags: bool, prioritize: bool) -> tuple[list[float], dict[str, Any]]:
    pl.seed_everything(1, verbose=False)
    model = toy.Model(bags=bags)
    callbacks = [BubbleMonitor()] if monitored else []
    options = {"callbacks": callbacks, "log_every_n_steps": 3, "limit_val_batches": 1, "val_check_interval": 7}
    trainer = toy.trainer(SynchronousStrategy(prioritize=prioritize), world, **options)
    trainer.fit(model, toy.loader(40), toy.loader(8, shuffle=False))
    return model.losses, toy.weights(model)


@pytest.mark.parametrize(
    ("world", "bags", "prioritize"), [(2, False, False), (3, True, False), (2, False, True)], ids=str
)
def test_the_training_stays_the_same_bit_for_bit(world: int, bags: bool, prioritize: bool) -> None:
    for plain, monitored in zip(
        run_ranks(train, world, args=(world, False, bags, prioritize)),
        run_ranks(train, world, args=(world, True, bags, prioritize)),
        strict=True,
    ):
        assert monitored[0] == plain[0]
        assert toy.same(monitored[1], plain[1])


# ---- settings of the Trainer ---------------------------------------------------------------------------------------
def kinds_of(rank: int, folder: Path, model: type, strategy: Any) -> set[str]:
    fit(2, model=model(), strategy=strategy, logger=CSVLogger(folder, name="", version=""), max_epochs=1)
    torch.distributed.barrier()
    run = read_run(folder)
    return {span.kind.value for index in run.indices for span in run.step(index)[rank].spans} - {
        "h2d"
    }  # exists only on CUDA


STEP = {"metrics", "dense_forward", "dense_backward", "optimizer", "allreduce"}
SYNCHRONOUS = {"id_exchange", "row_exchange", "gradient_exchange"}


@pytest.mark.parametrize("model", [toy.Model, toy.Manual], ids=lambda model: model.__name__)
def test_the_spans_of_a_step(model: type, tmp_path: Path) -> None:
    expected = STEP | SYNCHRONOUS | {"input_wait"}
    assert run_ranks(kinds_of, args=(tmp_path, model, None)) == [expected] * 2


class Dense(pl.LightningModule):
    """A model without TorchRec modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        return self.layer(torch.ones(len(batch.label), 4)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_monitor_works_with_any_strategy(tmp_path: Path) -> None:
    assert run_ranks(kinds_of, args=(tmp_path, Dense, "ddp")) == [STEP] * 2


def fit_fast(rank: int, folder: Path) -> int:
    logger = CSVLogger(folder, name="", version="")
    return fit(2, logger=logger, fast_dev_run=3, default_root_dir=folder).global_step


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    assert run_ranks(fit_fast, args=(tmp_path,)) == [3, 3]
    assert list(tmp_path.iterdir()) == []


def test_the_documentation_names_every_tag() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    named = {tag for line in page.splitlines() if line.startswith("| `") for tag in re.findall(r"`([a-z]+/\w+)`", line)}
    assert named == {*TAGS, *MORE_TAGS}


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="every: must be at least 1, not 0"):
        BubbleMonitor(every=0)


def test_sampling_adapts_and_covers_every_interval() -> None:
    monitor = BubbleMonitor()
    monitor._interval = 10
    for every in (1, 3, 7, 10):
        monitor._every = every
        sampled = [index for index in range(40) if monitor._records(index)]
        assert {index // 10 for index in sampled} == {0, 1, 2, 3}
        assert len(sampled) == 4 * math.ceil(10 / every)


def test_the_sampling_period_grows_with_the_overhead() -> None:
    assert [overhead.sampling_period(share) for share in (0.0, 0.05, 0.2)] == [10, 10, 40]


def fit_adaptively(rank: int, folder: Path) -> int:
    overhead.MAX_OVERHEAD = 1e-4  # not possible: the monitor records as few steps as it can
    monitor = BubbleMonitor()
    fit(2, monitor=monitor, logger=CSVLogger(folder, name="", version=""), log_every_n_steps=4)
    return monitor._every


def test_a_monitor_with_a_large_overhead_records_fewer_steps(tmp_path: Path) -> None:
    assert run_ranks(fit_adaptively, args=(tmp_path,)) == [4, 4]
    # All ranks have the figures of the first interval when they gather the second one, after step 9. Step 10 has begun then.
    assert read_run(tmp_path).indices == [*range(1, 11), *range(12, 32, 4)]


# ---- failures ------------------------------------------------------------------------------------------------------
class Failing(toy.Model):
    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 9:
            raise ValueError("the user's own mistake")
        return super().training_step(batch, batch_idx)


def fit_failing(rank: int, folder: Path) -> None:
    fit(
        2,
        model=Failing(),
        strategy=SynchronousStrategy(timeout=20),
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=4,
    )


def test_a_failure_keeps_the_steps_before_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="the user's own mistake"):
        run_ranks(fit_failing, args=(tmp_path,), every_error=True)
    assert read_run(tmp_path).indices == list(range(1, 9))


# ---- the other namespace, and how the strategy adds the monitor ---------------------------------------------------------
class OtherMonitor(BubbleMonitorMixin, pytorch_lightning.Callback):
    pass


class OtherModel(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = toy.Model()

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        return self.inner.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit_other_namespace(rank: int) -> dict[int, dict[str, float]]:
    class Other(pytorch_lightning.loggers.logger.Logger):  # type: ignore[misc]
        name, version = "other", 0
        logged: dict[int, dict[str, float]] = {}  # noqa: RUF012

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.logged.setdefault(step or 0, {}).update(metrics)

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    logger = Other()
    trainer = pytorch_lightning.Trainer(
        strategy=other_namespace.FreeScaleStrategy(prioritize=False, balance="off"),
        devices=2,
        accelerator="cpu",
        logger=logger,
        callbacks=[OtherMonitor()],
        max_steps=8,
        log_every_n_steps=4,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(OtherModel(), toy.loader())
    return logger.logged


def test_pytorch_lightning() -> None:
    logged, _ = run_ranks(fit_other_namespace)
    assert sorted(logged) == [3, 7]
    assert set(TAGS) <= set(logged[7])


def test_the_monitor_is_added_once_and_only_with_a_logger(tmp_path: Path) -> None:
    trainer = toy.trainer("auto", 1, logger=CSVLogger(tmp_path))
    add_monitor(trainer, BubbleMonitor)
    add_monitor(trainer, BubbleMonitor)
    assert sum(isinstance(callback, BubbleMonitor) for callback in trainer.callbacks) == 1
    silent = toy.trainer("auto", 1, logger=False)
    add_monitor(silent, BubbleMonitor)
    assert not any(isinstance(callback, BubbleMonitor) for callback in silent.callbacks)


# ---- FLOPs of a model ------------------------------------------------------------------------------------------------
def fit_hstu(rank: int, folder: Path) -> None:
    from lightning_freescale import SeqRecDataModule

    data = SeqRecDataModule(
        batch_size=2, max_history=32, balance="off", num_negatives=4, cache_dir=folder / "cache",
        synthetic={"users": 64, "items": 200},
    )  # fmt: skip
    pl.seed_everything(1, verbose=False)
    trainer = toy.trainer(
        SynchronousStrategy(), 2, max_epochs=1, max_steps=8, log_every_n_steps=4, callbacks=[BubbleMonitor(every=1)],
        logger=TensorBoardLogger(folder, name="", version="run"),
    )  # fmt: skip
    trainer.fit(HSTU(data.num_items, embedding_dim=16, num_layers=1), datamodule=data)


def test_a_model_with_cost_coefficients_has_flops(tmp_path: Path) -> None:
    run_ranks(fit_hstu, args=(tmp_path,))
    found = scalars(tmp_path / "run")
    assert all(value > 0 for value in found["throughput/tflops"].values())
    assert "throughput/mfu" not in found  # the peak of a CPU is not known
    assert all(1 <= value <= 2 for value in found["balance/cost_imbalance"].values())
    run = read_run(tmp_path / "run")
    record = run.records[0][run.indices[0]]
    assert record["counts"]["flops"] == record["counts"]["cost"] > record["counts"]["tokens"]
    assert sum(record["histograms"]["lengths"]) == record["counts"]["samples"] == 2
