"""Layers that run as CUDA graphs against the same layers without graphs: equal bit for bit, in every step of a training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_freescale.models import HSTU
from lightning_freescale.models.attention import cuda, hopper
from lightning_freescale.models.layer_graphs.registry import graphs_of
from lightning_freescale.runtime.errors import FreeScaleError
from lightning_freescale.runtime.gradient_places import backward_of_training_step, remember_places
from tests.models.cases import make_batch as make_samples
from tests.models.test_fused_layer import make_batch, make_layers, on_cuda, run_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper.available(), reason="the graphs need a Hopper GPU"),
]

SHAPES = [
    [300, 65, 83],
    [200, 100, 148],
    [64, 128],
    [300, 65, 83],
    [100, 28],
    [1000, 24, 1],
    [148, 200, 100],
    [1, 127],
    [65, 300, 83],
]


def run_steps(bias: bool, dropout: float, graphs: bool) -> tuple[list[dict[str, Tensor]], nn.ModuleList]:
    """Results of several batches; the parameters change after each."""
    from lightning_freescale.models.fused_layer import prepare_layers

    layers, found = make_layers(bias, 128, 2, 64, dropout, count=3).cuda(), []
    for step, lengths in enumerate(SHAPES):
        batch = on_cuda(make_batch(lengths, 128))
        batch["x"] += step
        batch["keys"] = batch["keys"] + step

        def prepare(layers: nn.ModuleList, plan: cuda.CudaPlan) -> None:
            prepare_layers(list(layers), plan, bool(dropout), graphs)

        with torch.autocast("cuda", torch.bfloat16):
            found.append(run_layers(layers, batch, True, prepare))
        with torch.no_grad():
            for name, parameter in layers.named_parameters():
                parameter -= 1e-2 * found[-1][name].sign()
    return found, layers


def used(layers: nn.ModuleList) -> int:
    """How many batches have run in graphs."""
    return graphs_of[layers[0]].used


def differing(got: list[dict[str, Tensor]], want: list[dict[str, Tensor]]) -> list[str]:
    pairs = enumerate(zip(got, want, strict=True))
    return [f"{step}: {name}" for step, (a, b) in pairs for name in b if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("dropout", [0.3, 0.0])
@pytest.mark.parametrize("bias", [True, False])
def test_graphs_compute_the_same_bits(bias: bool, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_freescale.models.layer_graphs import layer

    want, _ = run_steps(bias, dropout, graphs=False)
    got, layers = run_steps(bias, dropout, graphs=True)
    assert all(part.isfinite().all() for step in want for part in step.values())
    assert differing(got, want) == []
    assert used(layers) == 3  # the sixth shape needs more memory, and all are captured again

    monkeypatch.setattr(layer, "load", lambda place, value: None)  # negative control: graphs read old rows
    wrong, _ = run_steps(bias, dropout, graphs=True)
    assert differing(wrong, want) != []


def run_forward(layers: nn.ModuleList, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    from lightning_freescale.models.fused_layer import prepare_layers

    x: Any = batch["x"].detach().requires_grad_()
    leaf, plan = x, cuda.CudaPlan(batch["offsets"], batch["timestamps"], True)
    with torch.autocast("cuda", torch.bfloat16):
        prepare_layers(list(layers), plan, True, True)
        for layer in layers:
            x = layer._fused(x, plan, batch["keys"])
        return leaf, x.total()


def test_a_second_forward_before_the_backward_does_not_disturb_the_first() -> None:
    layers = make_layers(True, 128, 2, 64).cuda()
    first, second = (on_cuda(make_batch(lengths, 128)) for lengths in ([300, 65, 83], [200, 100, 148]))
    for batch in (first, first):  # captures the graphs, and runs in them
        leaf, out = run_forward(layers, batch)
        (want,) = torch.autograd.grad(out, leaf, batch["dout"])
    assert used(layers) == 1
    leaf, out = run_forward(layers, first)
    _, other = run_forward(layers, second)
    assert used(layers) == 2  # the second one runs without graphs
    (got,) = torch.autograd.grad(out, leaf, first["dout"])
    assert torch.equal(got, want)
    del other, out
    run_forward(layers, first)
    assert used(layers) == 3  # a forward that is thrown away ends, too
    run_forward(layers, first)
    assert used(layers) == 4


def test_a_backward_that_comes_too_late_is_an_error() -> None:
    layers = make_layers(True, 128, 2, 64).cuda()
    batch = on_cuda(make_batch([300, 65, 83], 128))
    kept = []
    for _ in range(2):  # the first one captures, the second one runs in the graphs
        leaf, out = run_forward(layers, batch)
        first, again = (torch.autograd.grad(out, leaf, batch["dout"], retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, again)
        kept.append((leaf, out))
    _, other = run_forward(layers, batch)
    for leaf, out in kept:
        with pytest.raises(FreeScaleError, match="after the forward of another batch"):
            torch.autograd.grad(out, leaf, batch["dout"], retain_graph=True)
    del other


def test_parameters_that_move_are_found() -> None:
    layers = make_layers(True, 128, 2, 64).cuda()
    batch = on_cuda(make_batch([300, 65, 83], 128))
    results = []
    for step in range(5):
        if step == 2:
            weight = layers[1].norm.weight
            weight.data = weight.data.clone() + 1
        leaf, out = run_forward(layers, batch)
        results.append(torch.autograd.grad(out, leaf, batch["dout"])[0])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])
    assert torch.equal(results[2], results[3])
    assert torch.equal(results[3], results[4])
    assert used(layers) > 0


def test_another_rate_of_dropout_is_used() -> None:
    layers, other = (make_layers(True, 128, 2, 64).cuda() for _ in range(2))
    batch = on_cuda(make_batch([300, 65, 83], 128))
    for layer in other:
        layer.dropout.rate = 0.1
    wanted = [run_forward(chosen, batch)[1] for chosen in (layers, other)]
    assert not torch.equal(*wanted)
    for rate, want in ((0.3, wanted[0]), (0.3, wanted[0]), (0.1, wanted[1]), (0.1, wanted[1]), (0.1, wanted[1])):
        for layer in layers:
            layer.dropout.rate = rate
        leaf, out = run_forward(layers, batch)
        torch.autograd.grad(out, leaf, batch["dout"])
        assert torch.equal(out, want)
    assert used(layers) > 0


def test_gradients_are_written_to_their_places() -> None:
    """The gradient of the last bias is none of a graph, and has no place."""
    layers = make_layers(True, 128, 2, 64).cuda()
    batch, parameters = on_cuda(make_batch([300, 65, 83], 128)), list(layers.parameters())
    flat = torch.zeros(sum(x.numel() for x in parameters), device="cuda")
    for parameter, part in zip(parameters, flat.split([x.numel() for x in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    remember_places(parameters)
    gradients, written = [], []
    for step in range(4):  # the first one captures the graphs
        layers.zero_grad()
        _, out = run_forward(layers, batch)
        with backward_of_training_step(accumulates=step < 3):
            out.backward(batch["dout"].to(out.dtype))
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
        memory = flat.untyped_storage().data_ptr()
        written.append(sum(gradient.untyped_storage().data_ptr() == memory for gradient in found))
    assert written == [0, len(parameters) - 1, len(parameters) - 1, 0]
    assert all(torch.equal(gradient, gradients[3]) for gradient in gradients)


@pytest.mark.parametrize("options", [{"bias": "relative"}, {"bias": "input", "feed_forward": {"hidden": 96}}])
def test_trainings_are_equal(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HSTU, "log", lambda *args, **kwargs: None)
    trained = []
    for graphs in (True, False):
        torch.manual_seed(0)
        model = HSTU(100, embedding_dim=64, num_layers=3, max_history=300, cuda_graphs=graphs, **options).cuda().train()
        optimizer = model.configure_optimizers()
        rng, losses = torch.Generator().manual_seed(0), []
        for step in range(12):
            lengths = [(300, 1, 64, 7), (100, 200, 70, 9), (30, 50, 6, 7)][step % 3]
            histories = [torch.randint(100, (n + step % 2,), generator=rng).tolist() for n in lengths]
            negatives = torch.randint(100, (4, 16), generator=rng).tolist()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model.training_step(make_samples(histories, negatives).to(torch.device("cuda")), step)
            loss.backward()
            if step % 2:  # every second step adds its gradients to those of the step before
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        if graphs:
            assert used(model.layers) > 3
        trained.append({"losses": torch.stack(losses)} | dict(model.state_dict()))
    assert [name for name in trained[1] if not torch.equal(trained[0][name], trained[1][name])] == []
