"""Copies of the state for asynchronous saves: training cannot change them, and they come to host memory by parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.strategy.checkpoints import device_copy
from lightning_freescale.strategy.checkpoints.device_copy import DeferredCopy, device_bytes, to_host


def state(device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(1000, 64, generator=generator).to(device)
    return {"table": table, "columns": table[:, 3:9], "empty": table[:0], "steps": [7, torch.tensor(3, device=device)]}


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    for name in ("table", "columns", "empty"):
        assert torch.equal(a[name], b[name].cpu()), name
        assert a[name].device.type == "cpu"
    assert a["steps"][0] == b["steps"][0]
    assert torch.equal(a["steps"][1], b["steps"][1].cpu())


@pytest.mark.parametrize("size", [8, 24, 100, 1 << 20])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 5), (33,)])
def test_parts_make_the_whole(size: int, shape: tuple[int, ...]) -> None:
    buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
    for dtype in (torch.float32, torch.float16, torch.int64, torch.bool):
        value = torch.randint(0, 2, shape).to(dtype)
        moved = to_host(value, buffers)
        assert torch.equal(moved, value)
        assert moved.shape == value.shape
        assert moved.data_ptr() != value.data_ptr() or not value.numel()


def test_a_copy_on_a_cpu_does_not_change() -> None:
    original = state("cpu")
    copied = DeferredCopy(original, torch.device("cpu"))
    original["table"].zero_()
    original["steps"][1].zero_()
    original["steps"][0] = 0
    assert_equal(copied.on_host(), state("cpu"))
    assert device_bytes(original) == 0
    with pytest.raises(AssertionError, match="table"):  # The negative control: the original has changed.
        assert_equal(original, state("cpu"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_change_by_other_code_during_the_copy_is_an_error(device: str) -> None:
    """Without such a change, the negative control, the copy that runs beside is exact."""
    for changes in (True, False):
        table = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)).to(device)
        late = device_copy.LateCopies([table])
        target = late.target_or(lambda tensor: tensor, torch.device(device))(table)
        late.start(torch.device(device) if device == "cuda" else None)
        if changes:
            table.add_(1.0)
        late.protect()
        table.zero_()  # as the training does
        late.wait_for_thread()
        if changes:
            with pytest.raises(CheckpointError, match="a table was changed between"):
                late.check()
        else:
            late.check()
            assert torch.equal(target.cpu(), torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)))


def test_a_copy_that_cannot_be_made_or_is_given_up_ends_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the save waits for the begin of the copy. It must not wait for one that does not come."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    failed, given_up, made = (DeferredCopy(torch.ones(3), torch.device("cpu")) for _ in range(3))
    for copied in (failed, given_up):  # as if the tensor were a large table
        copied._started.clear()
    monkeypatch.setattr(failed._late, "start", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        failed.start()
    given_up.abandon("the training ended")
    for copied, reason in ((failed, "could not be copied: no memory"), (given_up, "the training ended")):
        with pytest.raises(CheckpointError, match=reason):
            copied.on_host()
    made.abandon("too late")
    assert torch.equal(made.on_host(), torch.ones(3))


def many(device: str) -> list[torch.Tensor]:
    """Tensors of many types and forms, small and large. Some stay in host memory."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (0,), (3,), (4, 0, 2), (5, 7), (600, 600)]
    types = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]
    found = [torch.randn(shape, generator=generator).to(kind).to(device) for kind in types for shape in shapes]
    odd = torch.randn(8, 6, generator=generator).to(device)
    zeros = [torch.tensor([-0.0, 0.0, float("nan")], device=place) for place in (device, "cpu")]
    return [*found, odd.t(), odd[1::2, 2:], *zeros, torch.nn.Parameter(odd.clone())]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_of_many_tensors_are_exact_and_independent(device: str) -> None:
    tensors = many(device)
    copied = DeferredCopy({"a": tensors}, torch.device(device))
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()
    result = copied.on_host()["a"]
    for expected, copy in zip(many("cpu"), result, strict=True):
        assert copy.device.type == "cpu"
        assert (copy.shape, copy.dtype, copy.requires_grad) == (expected.shape, expected.dtype, False)
        assert bits(copy) == bits(expected)
        assert copy.untyped_storage().nbytes() == copy.nbytes  # ``torch.save`` writes the whole storage.


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_sparse_tensor_is_copied_as_it_is(device: str) -> None:
    def sparse() -> torch.Tensor:
        return torch.sparse_coo_tensor([[0, 2], [1, 0]], [3.0, 4.0], (3, 2), device=device)

    original = sparse()
    copied = DeferredCopy([original, torch.ones(3, device=device)], torch.device(device))
    original.zero_()
    copy, _ = copied.on_host()
    assert copy.layout is torch.sparse_coo
    assert copy.device.type == "cpu"
    assert torch.equal(copy.to_dense(), sparse().cpu().to_dense())


@pytest.mark.gpu
@pytest.mark.parametrize("enough", [True, False])
def test_a_copy_on_a_gpu_does_not_change(enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "CHUNK_BYTES", 4096)
    if not enough:
        monkeypatch.setattr(device_copy, "SPARE_SHARE", 1.0)
    original = state("cuda")
    before = torch.cuda.memory_allocated()
    copied = DeferredCopy(original, torch.device("cuda", 0))
    assert (torch.cuda.memory_allocated() - before >= device_bytes(original)) is enough
    original["table"].zero_()
    assert_equal(copied.on_host(), state("cpu"))
    assert torch.cuda.memory_allocated() == before
