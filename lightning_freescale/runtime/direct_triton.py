"""Launches of Triton kernels that take less of the host's time.

Triton looks at every argument of every launch, by Python code, to find the compiled kernel. That takes tens of microseconds, and
a training step starts dozens of small kernels. :class:`DirectKernel` keeps the compiled kernels under a key that is faster to
compute, and starts them by their ``run``, as ``compiled[grid](*arguments)`` of Triton does. It leaves out the hooks of a launch,
unless a profiler has set some.

The key has all that Triton compiles a kernel for: types, constants, whether a pointer or an integer is divisible by 16, and
whether an integer is 1. So a launch never uses a kernel that was compiled under other assumptions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.runtime.log import log_once

# Releases in which compiled kernels take all arguments of the kernel, constants included. Others are launched by Triton alone.
FIRST_RELEASE, LAST_RELEASE = (3, 6), (3, 9)
LOOKS_AT_TYPE, LOOKS_AT_VALUE = 0, 1
LOOKS_AT_DIVISIBILITY = 2  # also whether an integer is 1
_INT32 = 1 << 31
_stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)  # not in CPU builds


def is_supported(version: str) -> bool:
    """Whether kernels of this release of Triton can be started directly.

    >>> is_supported("3.6.0"), is_supported("3.5.1"), is_supported("4.0.0+git")
    (True, False, False)
    """
    release = tuple(int(part) for part in version.split(".")[:2])
    return FIRST_RELEASE <= release <= LAST_RELEASE


def looks_at(parameter: Any) -> int:
    """What Triton looks at in the argument of ``parameter``, one of ``kernel.params``: a ``LOOKS_AT`` constant."""
    if parameter.is_constexpr:
        return LOOKS_AT_VALUE
    return LOOKS_AT_TYPE if parameter.do_not_specialize else LOOKS_AT_DIVISIBILITY


def key_of(values: Sequence[Any], looks: Sequence[int]) -> tuple[tuple[Any, ...], list[Any]]:
    """All properties of the arguments that Triton compiles a kernel for, and the arguments with addresses in place of tensors.

    Triton would ask the driver about the address of each tensor. The key has the device of each tensor instead.

    Args:
        values: the arguments of a kernel in its order.
        looks: what Triton looks at in each of them, see :func:`looks_at`.
    """
    key: list[Any] = []
    plain = list(values)
    for at, look in enumerate(looks):
        value = plain[at]
        if look == LOOKS_AT_VALUE or value is None:  # None is a constant
            key.append(value)
        elif isinstance(value, Tensor):
            plain[at] = address = value.data_ptr()
            key += (value.dtype, value.get_device(), look and address & 15 == 0)
        elif type(value) is int:
            key.append((-_INT32 <= value < _INT32, value >= 2 * _INT32**2, look and (value == 1, value & 15 == 0)))
        else:  # floats and truth values have no properties
            key.append(type(value))
    return tuple(key), plain


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


class DirectKernel:
    """A Triton kernel with cheaper launches. It is called as the kernel itself: ``kernel[grid](*arguments, **constants)``.

    Args:
        kernel: the result of ``triton.jit``.
    """

    def __init__(self, kernel: Any):
        import triton

        self.kernel = kernel
        self._names: list[str] = list(kernel.arg_names)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        # Triton's interpreter compiles nothing.
        params = getattr(kernel, "params", [])
        self._direct = bool(params) and is_supported(triton.__version__)
        if params and not self._direct:
            log_once(
                f"Triton {triton.__version__} starts its kernels itself, which takes the host more time. Kernels are started "
                f"directly with Triton {_text(FIRST_RELEASE)} to {_text(LAST_RELEASE)}"
            )
        self._looks = [looks_at(param) for param in params]
        self._orders: dict[tuple[int, tuple[str, ...]], tuple[list[str], tuple[str, ...]]] = {}
        self._knobs: Any = triton.knobs.runtime if self._direct else None

    def _order(self, positional: int, named: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
        """Which named arguments of a launch are arguments of the kernel, in its order, and which are options of Triton."""
        order = self._orders.get((positional, named))
        if order is None:
            own = self._names[positional:]
            order = self._orders[positional, named] = own, tuple(name for name in named if name not in own)
        return order

    def _is_watched(self) -> bool:
        """Whether a profiler wants to see each launch."""
        enter, leave = self._knobs.launch_enter_hook, self._knobs.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if not self._direct:
            launch: Callable[..., None] = self.kernel[grid]
            return launch

        x, y, z = (*grid, 1, 1)[:3]

        def start(*arguments: Any, **named: Any) -> None:
            names, options = self._order(len(arguments), tuple(named))
            values = [*arguments, *[named[name] for name in names]]
            properties, plain = key_of(values, self._looks)
            key = (properties, options, *[named[name] for name in options])
            compiled = self._compiled.get(key)
            if compiled is None:
                self._compiled[key] = self.kernel[grid](*arguments, **named)
            elif self._is_watched():
                compiled[x, y, z](*values)
            else:
                stream = _stream_of(torch.cuda.current_device())
                compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *plain)

        return start


def direct(kernel: Any) -> DirectKernel:
    """Decorator above ``triton.jit`` of a kernel that the host starts. Functions that kernels call stay without it."""
    return DirectKernel(kernel)
