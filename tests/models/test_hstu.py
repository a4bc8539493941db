"""HSTU in one process: what it learns, what its outputs depend on, checkpoints, learning rate, costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.models import HSTU
from lightning_freescale.models.dropout import SampleDropout
from lightning_freescale.models.metrics import popularity_hit_rate
from lightning_freescale.runtime.errors import ConfigurationError, InputError
from tests.models.cases import make_batch

ITEMS = 30
BIASES = pytest.mark.parametrize("bias", ["relative", "input"])


def tiny(**options: Any) -> HSTU:
    torch.manual_seed(0)
    return HSTU(ITEMS, **{"embedding_dim": 16, "max_history": 32, **options})


def planted(samples: int = 64, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Histories that follow a fixed cycle over the items from a random start, and the next item of each."""
    rng = torch.Generator().manual_seed(seed)
    cycle = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(7)).tolist()
    starts = torch.randint(ITEMS, (samples,), generator=rng).tolist()
    lengths = torch.randint(2, 15, (samples,), generator=rng).tolist()
    walks = [[cycle[(s + i) % ITEMS] for i in range(n + 1)] for s, n in zip(starts, lengths, strict=True)]
    return [walk[:-1] for walk in walks], [walk[-1] for walk in walks]


def training_batch(histories: Sequence[Sequence[int]], negatives: int = 8, seed: int = 0, **options: Any) -> SeqBatch:
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randint(ITEMS, (len(histories), negatives), generator=rng).tolist()
    return make_batch(histories, drawn, **options)


def loader(batches: list[SeqBatch]) -> DataLoader:
    return DataLoader(batches, batch_size=None)


def trainer(tmp_path: Path, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }
    return pl.Trainer(**defaults | options)


@pytest.fixture
def unlogged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``self.log`` do nothing: without a Trainer there is no logger."""
    monkeypatch.setattr(HSTU, "log", lambda *args, **kwargs: None)


@BIASES
def test_learns_a_planted_sequence(tmp_path: Path, bias: str) -> None:
    histories, _ = planted()
    batches = [training_batch(histories[i : i + 16], seed=i) for i in range(0, 64, 16)]
    held_out, targets = planted(40, seed=1)
    model = tiny(lr=1e-2, bias=bias)
    fit = trainer(tmp_path, max_epochs=15)
    fit.fit(model, loader(batches), loader([make_batch(held_out, targets=targets)]))
    counts = torch.bincount(torch.tensor([i for row in histories for i in row]), minlength=ITEMS)
    popular = popularity_hit_rate(counts, torch.tensor(targets))
    assert fit.callback_metrics["val/hr@10"] > 0.95 > 2 * popular
    assert fit.callback_metrics["val/ndcg@10"] > 0.9
    assert fit.callback_metrics["val/loss"] < 1.0
    assert fit.callback_metrics["train/loss"] < 0.5


def test_bfloat16_learns_too(tmp_path: Path) -> None:
    histories, _ = planted()
    held_out, targets = planted(40, seed=1)
    fit = trainer(tmp_path, max_epochs=20, precision="bf16-mixed")
    val = loader([make_batch(held_out, targets=targets)])
    fit.fit(tiny(lr=2e-2, num_layers=1), loader([training_batch(histories)]), val)
    assert fit.callback_metrics["val/hr@10"] > 0.9


@pytest.mark.usefixtures("unlogged")
@BIASES
def test_loss_is_the_mean_over_positions(bias: str) -> None:
    """The loss of a batch is the mean of the losses of its samples, weighted by the number of positions they predict."""
    model = tiny(bias=bias)
    histories = planted(6)[0] + [[3]]
    whole = training_batch(histories)
    drawn = whole.features["negatives"].values().view(7, 8).tolist()
    total, count = 0.0, 0
    for history, negatives in zip(histories, drawn, strict=True):
        part = make_batch([history], [negatives])
        weight = int(model.num_predicted(part))
        assert weight == len(history) - 1
        total, count = total + weight * model.training_step(part, 0).item(), count + weight
    assert int(model.num_predicted(whole)) == count
    assert model.training_step(whole, 0).item() == pytest.approx(total / count, rel=1e-4)


@pytest.mark.usefixtures("unlogged")
@BIASES
@pytest.mark.parametrize("histories", [[[3], [5]], []])
def test_nothing_to_predict_gives_zero_loss_with_gradients(histories: list[list[int]], bias: str) -> None:
    model = tiny(bias=bias)
    batch = training_batch(histories) if histories else make_batch([])
    loss = model.training_step(batch, 0)
    assert loss == 0
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name  # DistributedDataParallel waits for every gradient
        assert not parameter.grad.any(), name


@pytest.mark.usefixtures("unlogged")
@BIASES
def test_outputs_depend_on_the_past_alone(bias: str) -> None:
    model = tiny(bias=bias).eval()
    first = model(make_batch([[1, 2, 3, 4, 5], [9, 8]]))
    second = model(make_batch([[1, 2, 3, 4, 25], [9, 8]]))
    assert torch.equal(first[:4], second[:4])
    assert not torch.allclose(first[4], second[4])
    torch.testing.assert_close(model(make_batch([[9, 8]])), first[5:])  # the other samples do not matter either


@BIASES
def test_time_and_order_matter(bias: str) -> None:
    model = tiny(bias=bias).eval()
    if bias == "relative":  # the biases start at 0
        for layer in model.layers:
            torch.nn.init.normal_(layer.time_bias)
            torch.nn.init.normal_(layer.position_bias)
    base = model(make_batch([[1, 2, 3]]))[-1]
    assert not torch.allclose(model(make_batch([[1, 2, 3]], gap=86_400))[-1], base)
    assert not torch.allclose(model(make_batch([[2, 1, 3]]))[-1], base)


@pytest.mark.usefixtures("unlogged")
def test_features_of_the_events() -> None:
    model = tiny(feature_sizes={"rating": 5, "device": 3})
    histories = [[1, 2, 3], [4, 5]]
    rating, device = [[0, 4, 1], [2, 2]], [[0, 1, 2], [0, 0]]
    loss = model.training_step(training_batch(histories, features={"rating": rating, "device": device}), 0)
    loss.backward()
    assert model.embedding.embeddings["device"].weight.grad.any()
    other = model.training_step(
        training_batch(histories, features={"rating": [[1, 4, 1], [2, 2]], "device": device}), 0
    )
    assert other != loss
    with pytest.raises(InputError, match=r"the batch has the keys \['history', 'negatives', 'device', 'rating'\]"):
        model.training_step(training_batch(histories, features={"device": device, "rating": rating}), 0)
    with pytest.raises(InputError, match="name the features"):
        model.training_step(training_batch(histories), 0)


def test_tables_on_the_meta_device() -> None:
    model = HSTU(10**9, embedding_dim=128, meta_tables=True, feature_sizes={"rating": 5}, table_std=None)
    tables = model.embedding.embeddings
    assert all(table.weight.is_meta for table in tables.values())
    assert not any(parameter.is_meta for parameter in model.layers.parameters())
    for config in model.embedding.embedding_configs():  # sharding calls this on the rows it has allocated
        shard = torch.full((50, 128), torch.nan)
        config.init_fn(shard)
        assert shard.norm(dim=1).mean() == pytest.approx(1, abs=0.05)


@pytest.mark.usefixtures("unlogged")
def test_sampling_correction_follows_the_counts() -> None:
    model = tiny()
    batch = training_batch(planted(4)[0])
    plain = model.training_step(batch, 0)
    model.correct_sampling(torch.ones(ITEMS))
    torch.testing.assert_close(model.training_step(batch, 0), plain)  # uniform counts need no correction
    model.correct_sampling(torch.arange(ITEMS))
    assert not torch.isclose(model.training_step(batch, 0), plain)


@BIASES
def test_checkpoint_restores_model_and_settings(tmp_path: Path, bias: str) -> None:
    model = tiny(num_heads=4, feature_sizes={"rating": 5}, temperature=0.1, bias=bias)
    fit = trainer(tmp_path, max_epochs=0)
    fit.fit(model, loader([training_batch([[1, 2]], features={"rating": [[0, 1]]})]))
    fit.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    loaded = HSTU.load_from_checkpoint(tmp_path / "model.ckpt", map_location="cpu")
    assert loaded.hparams == model.hparams
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_an_older_checkpoint_is_not_scaled(tmp_path: Path) -> None:
    """A checkpoint without the setting ``scale_input`` gives the outputs with which it was trained."""
    model = tiny(scale_input=False)
    fit = trainer(tmp_path, max_epochs=0)
    fit.fit(model, loader([training_batch([[1, 2]])]))
    fit.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)
    del saved["hyper_parameters"]["scale_input"]
    torch.save(saved, tmp_path / "older.ckpt")
    older = HSTU.load_from_checkpoint(tmp_path / "older.ckpt", map_location="cpu")
    assert not older.hparams["scale_input"]
    batch = make_batch([[1, 2, 3]])
    assert torch.equal(older(batch), model(batch))


def test_learning_rate_warms_up_and_decays() -> None:
    assert isinstance(tiny().configure_optimizers(), torch.optim.AdamW)
    made = tiny(lr=1.0, warmup_steps=4, max_steps=10).configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.5)
    assert rates[10:] == [0.0, 0.0]


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigurationError, match="num_heads: 3 does not divide embedding_dim 16"):
        tiny(num_heads=3)
    assert tiny(num_heads=3, qk_dim=4, v_dim=5)(make_batch([[1, 2]])).shape == (2, 16)


@pytest.mark.usefixtures("unlogged")
@BIASES
def test_cost_coefficients_count_the_products(bias: str) -> None:
    """The coefficients equal PyTorch's own count: of one event (linear maps), and of a long history (pairs of events)."""
    model = tiny(num_heads=4, qk_dim=8, v_dim=4, bias=bias)
    linear, attention, candidate = model.cost_coefficients()

    def counted(batch: SeqBatch) -> int:
        with FlopCounterMode(display=False) as counter:
            model.training_step(batch, 0).backward()
        return counter.get_total_flops()

    once = counted(training_batch([[1]], negatives=0))
    assert once == linear + 2 * attention
    long = 200  # one chunk, which computes all pairs; the formula counts half of them
    pairs = counted(training_batch([[1] * long], negatives=0)) - linear * long
    assert pairs == 2 * attention * long**2
    with_negatives = counted(training_batch([[1] * long], negatives=8)) - linear * long - pairs
    assert with_negatives == candidate * 8 * 7 * 32  # the loss computes seven whole tiles of 32 positions


def test_published_initial_values() -> None:
    model = HSTU(5000, embedding_dim=64, feature_sizes={"rating": 500})
    for table in model.embedding.embeddings.values():
        assert table.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for layer in model.layers:
        assert layer.f1.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert layer.f2.weight.abs().max().item() == pytest.approx((6 / 128) ** 0.5, rel=0.05)
        assert not layer.f1.bias.any()
        assert not layer.f2.bias.any()
    assert model.configure_optimizers().param_groups[0]["betas"] == (0.9, 0.98)
    old = HSTU(5000, embedding_dim=64, table_std=None, linear_init="torch", betas=(0.9, 0.999))
    assert old.embedding.embeddings["item"].weight.norm(dim=1).mean().item() == pytest.approx(1, abs=0.02)
    assert old.layers[0].f1.weight.abs().max().item() == pytest.approx(64**-0.5, rel=0.05)
    assert old.configure_optimizers().param_groups[0]["betas"] == (0.9, 0.999)


def test_rows_are_scaled_where_they_enter_the_layers() -> None:
    """Scaling the input by sqrt(D) equals four times as long rows, because D is 16. The loss on cosines does not change."""
    batch = make_batch([[1, 2, 3], [4, 5]])
    scaled, plain = tiny(), tiny(scale_input=False)
    plain.load_state_dict(scaled.state_dict())
    assert not torch.allclose(scaled(batch), plain(batch))
    with torch.no_grad():
        plain.embedding.embeddings["item"].weight.mul_(4)
    torch.testing.assert_close(scaled(batch), plain(batch))


@BIASES
@pytest.mark.parametrize("position_embedding", [None, False, True])
def test_which_input_embeddings_exist(bias: str, position_embedding: bool | None) -> None:
    names = {name for name, _ in tiny(bias=bias, position_embedding=position_embedding).named_parameters()}
    embeds_position = bias == "input" if position_embedding is None else position_embedding
    assert ("event_encoding.position.weight" in names) == embeds_position
    assert ("event_encoding.time_gap.weight" in names) == (bias == "input")
    assert ("layers.0.position_bias" in names) == ("layers.1.time_bias" in names) == (bias == "relative")


@pytest.mark.parametrize("option", ["input_dropout", "dropout"])
def test_dropout(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(**{"dropout": 0.0, "input_dropout": 0.0, option: 0.5})
    batch = training_batch([[1, 2, 3]])
    first = model(batch)
    assert torch.equal(model(batch), first)  # a step has one mask
    monkeypatch.setattr(HSTU, "global_step", 1)
    assert not torch.equal(model(batch), first)
    assert torch.equal(model.eval()(batch), tiny(dropout=0.0, input_dropout=0.0)(batch))


def test_published_dropout_is_the_default() -> None:
    model = tiny()
    assert [module.rate for module in model.modules() if isinstance(module, SampleDropout)] == [0.2, 0.2, 0.2]
    numbers = [module.number for module in model.modules() if isinstance(module, SampleDropout)]
    assert len(set(numbers)) == 3  # different masks


@pytest.mark.parametrize("option", ["bias", "linear_init"])
def test_unknown_values_of_options(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option}: 'other' is unknown; choose"):
        tiny(**{option: "other"})


def test_what_is_prepared_before_the_lookup_changes_nothing() -> None:
    model = tiny(dropout=0.3).train()
    batch, other = (training_batch(planted(count)[0]) for count in (20, 12))
    want = model.loss(model.embedding(batch.features), batch)
    model.prepare(batch)
    assert torch.equal(model.loss(model.embedding(batch.features), batch), want)
    assert model._prepared is None  # It belongs to one step: weights that it has rounded change after it.

    model.prepare(other)  # another batch: not used
    assert torch.equal(model.loss(model.embedding(batch.features), batch), want)
    model.prepare(other)  # negative control: it would change the loss
    assert model._prepared is not None
    model._prepared = model._prepared._replace(batch=batch)
    with pytest.raises((RuntimeError, IndexError, AssertionError)):
        model.loss(model.embedding(batch.features), batch)
