"""Zero-collision ids through the Trainer: both exchanges, validation, balance, checkpoints, other numbers of ranks, export."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection, EmbeddingConfig

import lightning_freescale as fs
from lightning_freescale.bubbles.advice import advise
from lightning_freescale.bubbles.analysis import analyse
from lightning_freescale.bubbles.records import read_run
from lightning_freescale.bubbles.summary import ID_TAGS
from tests import toy
from tests.ranks import RankFailed, run_ranks
from tests.slow import slow

ROWS = {"item": 96, "shop": 48}
OPTIONS = {
    "item": fs.ZeroCollision(buckets=6, max_probe=6, evict="ttl", ttl=2, insert=["clicks"], reserved=2),
    "shop": fs.ZeroCollision(buckets=6, max_probe=4, evict="lru"),
}
MODULES = "embeddings._managed_collision_collection._managed_collision_modules"


class Samples(toy.Samples):
    """Events of a catalogue that drifts: later samples have newer ids."""

    def __getitem__(self, index: int) -> tuple[int, list[Tensor], float]:
        chance = random.Random(index)
        newest = 40 + 2 * index
        ids = [
            [chance.randrange(newest - 40, newest) * 1_000_003 for _ in range(chance.randrange(6))]
            for _ in toy.FEATURES
        ]
        return index, [torch.tensor(part, dtype=torch.int64) for part in ids], float(index % 2)


def loader(size: int) -> DataLoader:
    return DataLoader(Samples(size), batch_size=3, collate_fn=toy.collate, shuffle=False)


class Model(toy.Model):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(
                name=name,
                embedding_dim=toy.DIM,
                num_embeddings=rows,
                feature_names=[feature for feature, table in toy.FEATURES.items() if table == name],
            )
            for name, rows in ROWS.items()
        ]
        self.embeddings = fs.zero_collision(EmbeddingCollection(tables=tables), OPTIONS)
        self.validated: list[float] = []
        self.prioritized = 0  # steps with the prioritized exchange

    def training_step(self, batch: toy.Batch, batch_idx: int) -> Tensor:
        schedule = self.trainer.strategy.schedule  # type: ignore[attr-defined]
        self.prioritized += schedule is not None and schedule.prioritized == ["embeddings"]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: toy.Batch, batch_idx: int) -> None:
        self.validated.append(self.loss(batch).item())


def whole(model: Any, strategy: fs.FreeScaleStrategy) -> dict[str, Tensor]:
    """Weights, identities, ages and optimizer state of all ranks, as float64. A collective."""
    values = dict(model.state_dict())
    assert strategy._sharded is not None
    for table, entry in strategy._sharded.fused_optimizer.state_dict()["state"].items():
        values |= {f"{table}.{name}": value for name, value in entry.items() if hasattr(value, "local_shards")}
    found = {}
    for key, value in values.items():
        if hasattr(value, "local_shards"):
            full = torch.zeros(value.metadata().size, dtype=torch.float64)
            for part in value.local_shards():
                places = zip(part.metadata.shard_offsets, part.metadata.shard_sizes, strict=True)
                full[tuple(slice(first, first + size) for first, size in places)] = part.tensor.double()
            torch.distributed.all_reduce(full)
            value = full
        found[key] = value.clone()
    return found


def fit(rank: int, world: int, options: dict[str, Any], trainer_options: dict[str, Any], resume: Any = None) -> Any:
    pl.seed_everything(1, verbose=False)
    model = Model()
    defaults: dict[str, Any] = {"balance": "off", "embedding_optimizer": {"optimizer": "adagrad", "lr": 0.1}}
    strategy = fs.FreeScaleStrategy(**(defaults | options))
    trainer = toy.trainer(strategy, world, **({"max_epochs": 1} | trainer_options))
    trainer.fit(model, loader(72), loader(12), ckpt_path=resume)
    if options["prioritize"] != "auto":
        assert model.prioritized == (len(model.losses) - 1 if options["prioritize"] else 0)
    return {"losses": model.losses, "validated": model.validated, "state": whole(model, strategy)}


def same(a: Any, b: Any) -> bool:
    return a["losses"] == b["losses"] and a["validated"] == b["validated"] and toy.same(a["state"], b["state"])


class Halve(pl.Callback):
    """Halves the rows of all tables after some steps. With the prioritized exchange, later batches have rows by then."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step in (3, 4, 8):
            trainer.strategy.flush()  # type: ignore[attr-defined]
            for value in module.state_dict().values():
                for shard in value.local_shards() if hasattr(value, "local_shards") else ():
                    if shard.tensor.is_floating_point():
                        with torch.no_grad():
                            shard.tensor.mul_(0.5)


def fit_and_halve(rank: int, prioritize: bool) -> Any:
    return fit(rank, 2, {"prioritize": prioritize}, {"callbacks": [Halve()]})


def test_tables_may_be_changed_after_a_flush() -> None:
    synchronous, prioritized = (run_ranks(fit_and_halve, args=(prioritize,)) for prioritize in (False, True))
    assert all(same(*pair) for pair in zip(synchronous, prioritized, strict=True))


VALIDATING = {"limit_val_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 1}


@pytest.mark.parametrize("world", [2, 3])
def test_both_exchanges_with_validation_in_between(world: int) -> None:
    runs = [run_ranks(fit, world, args=(world, {"prioritize": mode}, VALIDATING)) for mode in (True, False)]
    assert len(runs[0][0]["losses"]) == 72 // 3 // world
    assert len(runs[0][0]["validated"]) > 2
    assert all(same(a, b) for a, b in zip(*runs, strict=True))
    identities = runs[0][0]["state"][f"{MODULES}.item._hash_zch_identities"]
    assert (identities >= 0).sum() > 40


def test_rows_and_gradients_of_two_bytes() -> None:
    """``wire="bfloat16"`` rounds the same in both exchanges. The slots do not depend on it."""
    runs = [run_ranks(fit, 2, args=(2, {"prioritize": mode, "wire": "bfloat16"}, {})) for mode in (True, False)]
    assert all(same(a, b) for a, b in zip(*runs, strict=True))
    exact = run_ranks(fit, 2, args=(2, {"prioritize": True}, {}))[0]
    assert exact["losses"] != runs[0][0]["losses"]
    identities = f"{MODULES}.item._hash_zch_identities"
    assert torch.equal(exact["state"][identities], runs[0][0]["state"][identities])


def test_the_exchange_may_change_while_training() -> None:
    """``prioritize="auto"`` changes between the exchanges in the first steps, and ends with either of them."""
    runs = [run_ranks(fit, 2, args=(2, {"prioritize": mode}, {"max_epochs": 4})) for mode in ("auto", False)]
    assert len(runs[0][0]["losses"]) == 48  # the trial takes 35 of them
    assert all(same(a, b) for a, b in zip(*runs, strict=True))


def test_a_negative_id_on_one_rank_is_named_on_all() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(fit_with_a_negative_id, 2, every_error=True)
    assert sorted(failure.value.errors) == [0, 1]
    for text in failure.value.errors.values():
        assert "rank 1" in text
        assert "clicks: id -4 is negative; zero-collision ids are integers from 0 to 2^63 - 1" in text


def fit_with_a_negative_id(rank: int) -> None:
    batches = [toy.collate([Samples(72)[index] for index in range(3 * step, 3 * step + 3)]) for step in range(6)]
    if rank == 1:
        batches[4].features.values()[0] = -4
    plain = DataLoader(batches, batch_size=None)  # type: ignore[arg-type, var-annotated]
    strategy = fs.FreeScaleStrategy(prioritize=True, balance="off")
    toy.trainer(strategy, 2, max_epochs=1, use_distributed_sampler=False).fit(Model(), plain)


def test_balance_moves_samples_and_not_ids() -> None:
    """The global batch of a step stays the same, so the slots do, too. The rounding of the rows differs."""
    plain = run_ranks(fit, 2, args=(2, {"prioritize": True}, {}))[0]["state"]
    balanced = run_ranks(fit, 2, args=(2, {"prioritize": True, "balance": "fixed"}, {}))[0]["state"]
    for key, value in plain.items():
        if "_hash_zch" in key:
            assert torch.equal(value, balanced[key]), key
        else:
            torch.testing.assert_close(value, balanced[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("checkpoint", ["file", slow("sharded")])
def test_resume_and_other_numbers_of_ranks(tmp_path: Path, checkpoint: str) -> None:
    options = {"prioritize": True, "checkpoint": checkpoint}
    save = {
        "callbacks": [pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=5, save_top_k=-1)],
        "enable_checkpointing": True,
    }
    full = run_ranks(fit, 2, args=(2, options, save))
    path = str(tmp_path / "epoch=0-step=5.ckpt")
    resumed = run_ranks(fit, 2, args=(2, options, {}, path))
    synchronous = run_ranks(fit, 2, args=(2, {"prioritize": False, "checkpoint": checkpoint}, {}, path))
    for a, b, c in zip(full, resumed, synchronous, strict=True):
        assert b["losses"] == c["losses"] == a["losses"][5:]
        assert toy.same(a["state"], b["state"])
        assert toy.same(a["state"], c["state"])
    last = str(tmp_path / "epoch=0-step=10.ckpt")
    loaded = [run_ranks(load, world, args=(world, last))[0] for world in (1, 2, 3)]
    assert toy.same(loaded[0], loaded[1])
    assert toy.same(loaded[0], loaded[2])
    ages = loaded[0][f"{MODULES}.item._hash_zch_metadata"]
    assert ages.max() == 9
    assert int(loaded[0][f"{MODULES}.item._current_iter_tensor"]) == 10


def load(rank: int, world: int, path: str) -> dict[str, Tensor]:
    """The state after a checkpoint was loaded, without a step."""
    strategy = fs.FreeScaleStrategy()
    trainer = toy.trainer(strategy, world, limit_val_batches=1)
    model = Model()
    trainer.validate(model, loader(12), ckpt_path=path, verbose=False)
    return {key: value for key, value in whole(model, strategy).items() if "momentum" not in key}


@pytest.mark.parametrize("checkpoint", ["file", "sharded"])
def test_export_writes_which_row_belongs_to_which_id(tmp_path: Path, checkpoint: str) -> None:
    save = {"callbacks": [SaveAtTheEnd(str(tmp_path / "last.ckpt"))]}
    run = run_ranks(fit, 2, args=(2, {"prioritize": True, "checkpoint": checkpoint}, save))[0]
    weights = fs.export(tmp_path / "last.ckpt", tmp_path / "model.pt")
    for table in ROWS:
        mapping = pq.read_table(tmp_path / f"model.{table}.ids.parquet")
        identities = run["state"][f"{MODULES}.{table}._hash_zch_identities"].flatten()
        rows = torch.from_numpy(mapping["row"].to_numpy().copy())
        assert rows.tolist() == (identities >= 0).nonzero().flatten().tolist()
        assert mapping["id"].to_pylist() == identities[rows].long().tolist()
        assert mapping["seen"].to_pylist() == weights[f"{MODULES}.{table}._hash_zch_metadata"].flatten()[rows].tolist()
    model = Model().eval()  # without a strategy, on one process: the ids find their rows
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    newest = toy.collate([Samples(72)[index] for index in range(66, 72)])
    with torch.no_grad():
        found = model.embeddings(newest.features)["clicks"].values()
    known = pq.read_table(tmp_path / "model.item.ids.parquet").to_pydict()
    row_of = dict(zip(known["id"], known["row"], strict=True))
    table = weights["embeddings._embedding_module.embeddings.item.weight"]
    ids = newest.features["clicks"].values().tolist()
    assert sum(number in row_of for number in ids) > len(ids) / 4
    for number, row in zip(ids, found, strict=True):
        if number in row_of:
            assert torch.equal(row, table[row_of[number]])


def test_ids_are_logged_and_advised_on(tmp_path: Path) -> None:
    """The metrics of both exchanges, and the advice of the report: these tables are too small for their ids."""
    logged = {}
    for mode in (True, False):
        logger = CSVLogger(tmp_path, name="", version=str(mode))
        run_ranks(fit, 2, args=(2, {"prioritize": mode}, {"logger": logger, "log_every_n_steps": 4}))
        with open(Path(logger.log_dir) / "metrics.csv") as stream:
            rows = [row for row in csv.DictReader(stream) if row["ids/load"]]
        logged[mode] = [{tag: float(row[tag]) for tag in ID_TAGS} for row in rows]
        assert len(rows) == 3
        analysis = analyse(read_run(Path(logger.log_dir)))
        assert any("have no row of their own" in advice.text for advice in advise(analysis))
    for tag in ID_TAGS:
        if tag != "ids/load":  # the prioritized exchange has inserted the ids of two more batches
            assert [row[tag] for row in logged[True]] == [row[tag] for row in logged[False]], tag
    last = logged[False][-1]
    assert 0.5 < last["ids/load"] <= 1
    assert last["ids/inserted"] > last["ids/evicted"] > 0
    assert 0 < last["ids/collisions"] < last["ids/fallback"] < 1


class SaveAtTheEnd(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


class InEvaluation(Model):
    """Has its collection in evaluation mode from step 4 on. Ids are no longer inserted then, and rows are still trained."""

    def forward(self, features: Any) -> Tensor:
        self.embeddings.train(self.trainer.global_step < 4)
        return super().forward(features)


def fit_in_evaluation(rank: int, prioritize: bool) -> Any:
    pl.seed_everything(1, verbose=False)
    model = InEvaluation()
    strategy = fs.FreeScaleStrategy(
        balance="off", embedding_optimizer={"optimizer": "adagrad", "lr": 0.1}, prioritize=prioritize
    )
    toy.trainer(strategy, 2, max_epochs=1).fit(model, loader(72))
    return {"losses": model.losses, "validated": model.prioritized, "state": whole(model, strategy)}


def test_a_collection_in_evaluation_mode_is_exchanged_synchronously() -> None:
    """Ids of later batches would be inserted in advance, which the synchronous exchange does not do."""
    for plain, found in zip(*(run_ranks(fit_in_evaluation, args=(mode,)) for mode in (False, True)), strict=True):
        assert (plain.pop("validated"), found.pop("validated")) == (0, 4)
        assert found["losses"] == plain["losses"]
        assert toy.same(found["state"], plain["state"])
