"""Direct launches of Triton kernels: they use the kernel that Triton would use."""

from __future__ import annotations

import doctest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_freescale.runtime import direct_triton
from lightning_freescale.runtime.direct_triton import (
    LOOKS_AT_DIVISIBILITY,
    LOOKS_AT_TYPE,
    LOOKS_AT_VALUE,
    key_of,
    looks_at,
)
from tests.models.interpreter import run_interpreted

CHECK = "import torch; from tests.runtime.test_direct_triton import check_launches; check_launches(torch.device('cpu'))"


def test_supported_releases() -> None:
    assert doctest.testmod(direct_triton).failed == 0


def one_key(value: Any, look: int = LOOKS_AT_DIVISIBILITY) -> Any:
    return key_of([value], [look])[0]


def test_keys_tell_apart_what_triton_compiles_for() -> None:
    memory = torch.zeros(64)
    apart = [memory, memory[1:], memory.double(), 1, 3, 16, 1 << 31, 1 << 32, 1 << 63, 0.5, True, None]
    assert len({one_key(value) for value in apart}) == len(apart) - 1
    assert one_key(1 << 31) == one_key(1 << 32)  # both have 64 bits
    alike = [(memory, memory[4:]), (3, 5), (16, 32), (0.5, 1.0), (True, False)]
    for one, other in alike:
        assert one_key(one) == one_key(other)
    assert len({one_key(value, LOOKS_AT_VALUE) for value in (3, 5, 16, 32)}) == 4
    # Triton does not look at the values of parameters that do_not_specialize names.
    assert len({one_key(value, LOOKS_AT_TYPE) for value in (1, 3, 16)}) == 1
    assert len({one_key(value, LOOKS_AT_TYPE) for value in (memory, memory[1:])}) == 1
    assert len({one_key(value, LOOKS_AT_TYPE) for value in (memory, memory.double(), 1, 1 << 31, 1 << 63)}) == 5


def test_tensors_are_passed_by_address() -> None:
    memory = torch.zeros(64)
    looks = [LOOKS_AT_DIVISIBILITY, LOOKS_AT_TYPE, LOOKS_AT_DIVISIBILITY, LOOKS_AT_VALUE]
    assert key_of([memory, memory[1:], None, 7], looks)[1] == [memory.data_ptr(), memory.data_ptr() + 4, None, 7]
    if torch.cuda.is_available():
        assert one_key(memory) != one_key(memory.cuda())


def test_what_triton_looks_at() -> None:
    parameters = [SimpleNamespace(is_constexpr=c, do_not_specialize=d) for c, d in ((1, 0), (0, 1), (0, 0))]
    assert [looks_at(parameter) for parameter in parameters] == [LOOKS_AT_VALUE, LOOKS_AT_TYPE, LOOKS_AT_DIVISIBILITY]


def launch(x: Tensor, y: Tensor | None, stride: int, factor: int, count: int = 40) -> bool:
    """Whether a launch gives what PyTorch gives."""
    from tests.runtime.strided_sum_kernel import strided_sum

    out = torch.empty(count, device=x.device)
    strided_sum[(2,)](x, y, out, count, stride, FACTOR=factor, SIZE=32, num_warps=2)
    expected = factor * x[::stride][:count] + (0 if y is None else y[:count])
    return torch.equal(out, expected)


def check_launches(device: torch.device) -> None:
    """Assert that all launches are right, each of them the first and a later one of its kernel."""
    memory = torch.arange(1000.0, device=device)
    for _ in range(3):
        for x in (memory, memory[1:], memory[4:]):
            for y in (memory, memory[2:], None):
                assert all(launch(x, y, stride, factor) for stride in (1, 3, 16) for factor in (1, 2))
                assert launch(x, y, 3, 2, count=1)


def test_launches_in_the_interpreter() -> None:
    run_interpreted(CHECK)


@pytest.mark.gpu
def test_launches_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.runtime.strided_sum_kernel import strided_sum

    device = torch.device("cuda")
    check_launches(device)
    assert strided_sum._direct
    # A profiler sees the launches of compiled kernels.
    import triton

    seen: list[Any] = []
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        check_launches(device)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 3 * 3 * 3 * 7
    assert len(strided_sum._compiled) == 2 * 3 * 3 * 2  # alignments of x, of y or no y, strides, factors
    # The control: without the properties of integers, the kernel for stride 1 would run for stride 3.
    addresses = direct_triton.key_of
    monkeypatch.setattr(direct_triton, "key_of", lambda values, looks: ((), addresses(values, looks)[1]))
    memory = torch.arange(1000.0, device=device)
    assert launch(memory, None, 1, 1)
    assert not launch(memory, None, 3, 1)
    strided_sum._compiled.clear()
