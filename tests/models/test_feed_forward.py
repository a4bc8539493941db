"""HSTU with feed-forward layers: what they compute, their losses and logs, checkpoints, costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_freescale.models import HSTU, FeedForward, MoE
from lightning_freescale.models.feed_forward import FeedForwardLayer, take_router_losses
from lightning_freescale.runtime.errors import ConfigurationError
from tests.models.test_hstu import ITEMS, loader, planted, tiny, trainer, training_batch, unlogged  # noqa: F401

EXPERTS = FeedForward(experts=4, top_k=2, hidden=8)


def test_a_layer_follows_each_layer() -> None:
    model = tiny(feed_forward=EXPERTS, dropout=0.0, input_dropout=0.0).eval()
    batch = training_batch(planted(5)[0])
    seen: list[torch.Tensor] = []
    for layer in model.feed_forwards:
        layer.register_forward_hook(lambda module, inputs, out: seen.extend([inputs[0], out]))
    model(batch)
    assert len(seen) == 2 * len(model.layers)
    layer = model.feed_forwards[0]
    assert isinstance(layer, FeedForwardLayer)
    torch.testing.assert_close(seen[1], seen[0] + layer.moe(layer.norm(seen[0])), rtol=0, atol=0)
    assert not torch.equal(tiny(dropout=0.0, input_dropout=0.0).eval()(batch), model(batch))


def test_one_expert_is_a_dense_layer() -> None:
    layer = FeedForward(hidden=12).layers(16, 1, 0.0)[0]
    x = torch.randn(7, 16)
    ab = layer.norm(x) @ layer.moe.w_in[0]
    dense = x + (torch.nn.functional.silu(ab[:, 0::2]) * ab[:, 1::2]) @ layer.moe.w_out[0]
    torch.testing.assert_close(layer(x), dense, rtol=1e-6, atol=1e-6)
    assert take_router_losses([layer]) == (0.0, {})


def test_the_routers_are_part_of_the_loss() -> None:
    batch = training_batch(planted(5)[0])
    losses = []
    for weights in ({"balance_loss": 0.0, "z_loss": 0.0}, {"balance_loss": 0.5, "z_loss": 0.0}, {"z_loss": 2.0}):
        model = tiny(feed_forward=FeedForward(4, 2, 8, **{"balance_loss": 0.0, **weights}), dropout=0, input_dropout=0)
        embedded = model.embedding(batch.features)
        model.encode(embedded, batch)
        terms = [layer.moe.take_terms() for layer in model.feed_forwards]  # type: ignore[union-attr, operator]
        losses.append((float(model.loss(embedded, batch)), terms))
        assert all(layer.moe.sums is None for layer in model.feed_forwards)  # type: ignore[union-attr]
    (plain, _), (balanced, terms), (scored, _) = losses
    assert balanced - plain == pytest.approx(0.5 * float(sum(x.balance for x in terms)), rel=1e-4)
    assert scored - plain == pytest.approx(2.0 * float(sum(x.z for x in terms)), rel=1e-4)
    assert all(float(x.load.sum()) == pytest.approx(1.0) and len(x.load) == 4 for x in terms)


def test_trains_logs_and_saves(tmp_path: Path) -> None:
    histories, targets = planted(64)
    model = tiny(feed_forward=EXPERTS, lr=5e-3)
    fit = trainer(tmp_path, max_epochs=15)
    batches = [training_batch(histories[i : i + 16], targets=targets[i : i + 16]) for i in range(0, 64, 16)]
    before = float(tiny(feed_forward=EXPERTS).eval().loss(model.embedding(batches[0].features), batches[0]))
    fit.fit(model, loader(batches))
    logged = fit.callback_metrics
    assert float(logged["train/loss"]) < 0.7 * before
    assert 1 <= float(logged["experts/busiest"]) <= 4
    assert 0 <= float(logged["experts/idlest"]) <= 1
    assert {"experts/balance_loss", "experts/z_loss", "experts/layer_1/busiest", "experts/layer_2/busiest"} <= set(
        logged
    )
    fit.save_checkpoint(tmp_path / "model.ckpt")
    loaded = HSTU.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True).eval()
    torch.testing.assert_close(loaded(batches[0]), model.eval()(batches[0]), rtol=0, atol=0)
    assert loaded.hparams["feed_forward"]["experts"] == 4


@pytest.mark.usefixtures("unlogged")
def test_cost_counts_the_experts_of_an_event() -> None:
    plain, model = tiny(), tiny(feed_forward=EXPERTS)
    added = model.cost_coefficients()[0] - plain.cost_coefficients()[0]
    batch = training_batch([[1, 2, 3]], negatives=0)

    def counted(model: HSTU) -> int:
        with FlopCounterMode(display=False) as counter:
            model.training_step(batch, 0).backward()
        return counter.get_total_flops()

    assert counted(model) - counted(plain) == 3 * added
    assert added == 2 * 6 * 16 * (2 * 3 * 8 + 4)  # two layers


def test_a_mixture_of_experts_gives_the_sizes(recwarn: pytest.WarningsRecorder) -> None:
    given = MoE(16, 8, 4, 2, "x", expert_parallel=True)
    model = tiny(feed_forward=given)
    assert not [warning for warning in recwarn if "nn.Module" in str(warning.message)]
    assert (
        model.hparams["feed_forward"]
        == tiny(feed_forward=FeedForward(4, 2, 8, "x", expert_parallel=True)).hparams["feed_forward"]
    )
    first, second = (layer.moe for layer in model.feed_forwards)
    assert first.w_in.shape == given.w_in.shape
    assert not torch.equal(first.w_in, second.w_in)
    with pytest.raises(ConfigurationError, match=r"feed_forward: MoE\(dim=8, ...\) does not fit embedding_dim 16"):
        tiny(feed_forward=MoE(8, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 2, "top_k": 3}, "top_k: must be between"),
        ({"z_loss": -1.0}, "feed_forward: z_loss must not be negative"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HSTU(ITEMS, feed_forward=options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_on_cuda_equals_a_cpu(dtype: torch.dtype) -> None:
    """Rounding to bfloat16 may choose another expert for a few events, so its tolerance is large."""
    torch.manual_seed(0)
    layer, x = FeedForward(4, 2).layers(64, 1, 0.2)[0], torch.randn(500, 64)
    torch.nn.init.normal_(layer.moe.router)  # clear choices
    keys, results = torch.randint(-(2**31), 2**31, (500,)).int(), []
    for device in ("cpu", "cuda"):
        moved = layer.to(device)
        rows = x.to(device, copy=True).requires_grad_()
        with torch.autocast(device, dtype, enabled=device == "cuda" and dtype != torch.float32):
            out = moved(rows, keys.to(device))
        loss = out.square().mean() + take_router_losses([moved])[0]
        results.append([out.detach(), *torch.autograd.grad(loss, [rows, *moved.parameters()])])
        assert out.dtype == torch.float32
    for want, got in zip(*results, strict=True):
        assert float((got.cpu() - want).norm() / want.norm()) < (1e-4 if dtype == torch.float32 else 0.15)
