"""The kernels that this GPU selects, and the Triton kernels, against the dense reference in float64 on the same rounded inputs.

Errors are ``|got - expected| / |expected|``. A product of float32 inputs is three TF32 products, which is close to float32.
With inputs of 16 bits the weights and the score gradients are rounded before a product, and the results are rounded once more.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_freescale.models import HSTU
from lightning_freescale.models.attention import hopper, hstu_attention
from lightning_freescale.models.attention.buckets import log_bucket, relative_times
from tests.models.cases import (
    NAMES,
    assert_close,
    attention_inputs,
    dense_result,
    make_batch,
    relative_errors,
    run_attention,
    run_without_bias,
    zero_bias,
)

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}
TYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def check(inputs: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Compare with the reference. A bias gradient is a sum of terms that cancel in part, so its relative error is larger."""
    got, expected = run_attention(hstu_attention, inputs), dense_result(inputs)
    assert_close(got, {name: expected[name] for name in NAMES[:4]}, TOLERANCE[dtype])
    factor = 1 if dtype == torch.float32 else 4
    assert_close(got, {name: expected[name] for name in NAMES[4:]}, factor * TOLERANCE[dtype])


@TYPES
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1000])
def test_one_history(length: int, dtype: torch.dtype) -> None:
    check(attention_inputs([length], qk_dim=32, v_dim=32, dtype=dtype, device="cuda"), dtype)


@TYPES
@pytest.mark.parametrize("width", [32, 64, 128])
def test_mixed_lengths_with_empty_histories(width: int, dtype: torch.dtype) -> None:
    lengths = [0, 700, 1, 64, 0, 129, 33, 2, 0]
    check(attention_inputs(lengths, heads=4, qk_dim=width, v_dim=width, dtype=dtype, device="cuda"), dtype)


@pytest.fixture(params=[True, False], ids=["selected", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that this GPU selects, and the Triton kernels on every GPU."""
    if not request.param:
        monkeypatch.setattr(hopper, "available", lambda device: False)


@TYPES
@pytest.mark.usefixtures("kernels")
def test_both_kernels(dtype: torch.dtype) -> None:
    check(attention_inputs([300, 0, 65, 1], qk_dim=64, v_dim=32, dtype=dtype, device="cuda"), dtype)


@TYPES
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", [32, 64])
def test_without_bias(width: int, dtype: torch.dtype) -> None:
    lengths = [0, 700, 1, 64, 0, 129, 33, 2, 0]
    inputs = zero_bias(attention_inputs(lengths, heads=4, qk_dim=width, v_dim=width, dtype=dtype, device="cuda"))
    expected = dense_result(inputs, NAMES[:4])
    assert_close(run_without_bias(hstu_attention, inputs), expected, 2 * TOLERANCE[dtype])


@TYPES
def test_unsorted_times(dtype: torch.dtype) -> None:
    inputs = attention_inputs([300, 65], qk_dim=32, v_dim=32, dtype=dtype, device="cuda", sorted_times=False)
    check(inputs, dtype)


def test_views_and_widths_other_than_powers_of_two() -> None:
    inputs = attention_inputs([200, 50], heads=3, qk_dim=24, v_dim=40, dtype=torch.bfloat16, device="cuda")
    packed = torch.cat(
        [inputs[name].flatten(1) for name in ("q", "k", "v")], 1
    )  # a layer splits one projection like this
    q, k, v = packed.split([72, 72, 120], 1)
    views = inputs | {"q": q.unflatten(1, (3, 24)), "k": k.unflatten(1, (3, 24)), "v": v.unflatten(1, (3, 40))}
    assert torch.equal(hstu_attention(**views), hstu_attention(**inputs))
    check(inputs, torch.bfloat16)


@pytest.mark.parametrize("buckets", [1, 2, 5])
def test_small_position_tables(buckets: int) -> None:
    """Long distances share the last bucket. A table of one or two entries takes the code path of blocks far from the diagonal."""
    inputs = attention_inputs(
        [150, 40], qk_dim=32, v_dim=32, dtype=torch.float32, device="cuda", position_buckets=buckets
    )
    check(inputs, torch.float32)


def test_a_wrong_bucket_is_detected() -> None:
    """Negative control: with tables shifted by one bucket, or one wrong entry, the error is far above the tolerance."""
    inputs = attention_inputs([500, 80], qk_dim=32, v_dim=32, dtype=torch.bfloat16, device="cuda")
    expected = dense_result(inputs)
    for table in ("position_bias", "time_bias"):
        shifted = inputs | {table: inputs[table].roll(1)}
        assert relative_errors(run_attention(hstu_attention, shifted), expected)["out"] > 5 * TOLERANCE[torch.bfloat16]
    one = inputs["position_bias"].clone()
    one[12] += 1.0
    errors = relative_errors(run_attention(hstu_attention, inputs | {"position_bias": one}), expected)
    assert errors["out"] > 5 * TOLERANCE[torch.bfloat16]


@TYPES
def test_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    inputs = attention_inputs([257, 1000, 64, 3], qk_dim=64, v_dim=64, dtype=dtype, device="cuda")
    alone = {name: value if "bias" in name else value[:257] for name, value in inputs.items() if name != "offsets"}
    alone["offsets"] = torch.tensor([0, 257], device="cuda")
    together, single = run_attention(hstu_attention, inputs), run_attention(hstu_attention, alone)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(together[name][:257], single[name]), name
    again = run_attention(hstu_attention, inputs)
    assert all(
        torch.equal(together[name], again[name]) for name in together
    )  # the kernels use no atomics, so a second run has the same bits


def test_no_samples() -> None:
    for lengths in ([], [0, 0]):
        inputs = attention_inputs(lengths, dtype=torch.bfloat16, device="cuda", position_buckets=3)
        got = run_attention(hstu_attention, inputs)
        assert got["out"].shape == (0, 2, 16)
        assert not got["dtime"].any()


def test_a_history_of_21k_events_stores_no_square() -> None:
    """Forward and backward allocate less than 16 arrays of the size of the output. The scores of one head would be 1.7 GiB."""
    inputs = attention_inputs([21_000, 5_000], heads=8, qk_dim=128, v_dim=128, dtype=torch.bfloat16, device="cuda")
    learned = [inputs[name].requires_grad_() for name in ("q", "k", "v", "position_bias", "time_bias")]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = hstu_attention(**inputs)
    grads = torch.autograd.grad(out, learned, torch.ones_like(out))
    used = torch.cuda.max_memory_allocated() - before
    assert used < 16 * out.numel() * out.element_size()
    assert all(grad.isfinite().all() for grad in grads)


def test_the_end_of_a_21k_history_equals_the_reference() -> None:
    """The last rows equal a reference of those rows. Blocks far from the diagonal take another code path than near ones."""
    inputs = attention_inputs([21_000], heads=1, qk_dim=32, v_dim=32, dtype=torch.float32, device="cuda")
    out = hstu_attention(**inputs)[-100:, 0].double()
    q, k, v = (inputs[name][:, 0].double() for name in ("q", "k", "v"))
    position = torch.arange(21_000, device="cuda", dtype=torch.int32)
    times = relative_times(inputs["timestamps"], inputs["offsets"])
    distance, elapsed = position[-100:, None] - position, times[-100:, None] - times
    scores = q[-100:] @ k.T / 32**0.5
    scores += inputs["position_bias"].double()[log_bucket(distance, len(inputs["position_bias"])).long()]
    scores += inputs["time_bias"].double()[log_bucket(elapsed, len(inputs["time_bias"])).long()]
    weights = torch.nn.functional.silu(scores) * (distance >= 0) / (position[-100:, None] + 1)
    assert float((out - weights @ v).norm() / (weights @ v).norm()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("bias", ["relative", "input"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_model_on_gpu_equals_model_on_cpu(precision: torch.dtype, bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HSTU, "log", lambda *args, **kwargs: None)
    torch.manual_seed(0)
    model = HSTU(100, embedding_dim=64, max_history=300, bias=bias)
    rng = torch.Generator().manual_seed(0)
    histories = [torch.randint(100, (n,), generator=rng).tolist() for n in (300, 1, 64, 7)]
    negatives = torch.randint(100, (4, 16), generator=rng).tolist()
    expected = model.training_step(make_batch(histories, negatives), 0)
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.cuda()
    with torch.autocast("cuda", precision, enabled=precision != torch.float32):
        # A new batch: TorchRec's unsharded collection caches views on the first device in the features of the batch.
        loss = model.training_step(make_batch(histories, negatives).to(torch.device("cuda")), 0)
    loss.backward()
    tolerance = 1e-4 if precision == torch.float32 else 3e-2
    torch.testing.assert_close(loss.cpu(), expected, rtol=tolerance, atol=0)
    for name, parameter in model.named_parameters():
        error = (parameter.grad.cpu() - gradients[name]).norm() / gradients[name].norm()
        assert error < 5 * tolerance, name
