"""Launches of Triton kernels that take less of the host's time.

Triton looks at every argument of every launch, by Python code, to find the compiled kernel. That takes tens of microseconds, and
a training step starts dozens of small kernels. :class:`DirectKernel` keeps the compiled kernels under a key that is faster to
compute, and starts them by ``compiled[grid](*arguments)``, as Triton's own tutorials do.

The key has all that Triton compiles a kernel for: types, constants, whether a pointer or an integer is divisible by 16, and
whether an integer is 1. So a launch never uses a kernel that was compiled under other assumptions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_freescale.runtime.log import log_once

# Releases in which compiled kernels take all arguments of the kernel, constants included. Others are launched by Triton alone.
FIRST_RELEASE, LAST_RELEASE = (3, 6), (3, 9)
LOOKS_AT_TYPE, LOOKS_AT_VALUE = 0, 1
LOOKS_AT_DIVISIBILITY = 2  # also whether an integer is 1
_INT32 = 1 << 31


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


def key_of(values: Sequence[Any], looks: Sequence[int]) -> tuple[Any, ...]:
    """All properties of the arguments that Triton compiles a kernel for.

    Args:
        values: the arguments of a kernel in its order.
        looks: what Triton looks at in each of them, see :func:`looks_at`.
    """
    key: list[Any] = []
    for value, look in zip(values, looks, strict=True):
        if look == LOOKS_AT_VALUE or value is None:  # None is a constant
            key.append(value)
        elif isinstance(value, Tensor):
            key.append((value.dtype, look and value.data_ptr() & 15 == 0))
        elif type(value) is int:
            size = -_INT32 <= value < _INT32, value >= 2 * _INT32**2
            key.append((*size, value == 1, value & 15 == 0) if look else size)
        else:  # floats and truth values have no properties
            key.append(type(value))
    return tuple(key)


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

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if not self._direct:
            launch: Callable[..., None] = self.kernel[grid]
            return launch

        def start(*arguments: Any, **named: Any) -> None:
            values = [*arguments, *(named[name] for name in self._names[len(arguments) :])]
            options = tuple((name, value) for name, value in named.items() if name not in self._names)
            device = next((value.get_device() for value in values if isinstance(value, Tensor)), -1)
            key = (device, options, *key_of(values, self._looks))
            compiled = self._compiled.get(key)
            if compiled is None:
                self._compiled[key] = self.kernel[grid](*arguments, **named)
            else:
                compiled[(*grid, 1, 1)[:3]](*values)

        return start


def direct(kernel: Any) -> DirectKernel:
    """Decorator above ``triton.jit`` of a kernel that the host starts. Functions that kernels call stay without it."""
    return DirectKernel(kernel)
