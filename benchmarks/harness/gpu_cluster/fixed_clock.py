"""A fixed clock of the GPU's SMs for the duration of a measurement.

A GPU lowers its clock when it would use more power than it may. Variants that keep the GPU busy then compute more slowly than
those that wait for transfers, although they run the same kernels. With a fixed clock below that limit all variants compute alike.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fixed_clock(megahertz: int | None) -> Iterator[None]:
    """Set the clock of the SMs of all GPUs in the block. ``None`` leaves it as it is.

    Raises:
        RuntimeError: if the clock cannot be set. This needs the rights of an administrator on most machines.
    """
    if megahertz is None:
        yield
        return
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise RuntimeError(f"--clock {megahertz}: nvidia-smi is not installed. Leave the option out")
    done = subprocess.run(
        [tool, f"--lock-gpu-clocks={megahertz},{megahertz}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"--clock {megahertz}: nvidia-smi says: {(done.stdout + done.stderr).strip()}")
    try:
        yield
    finally:
        subprocess.run([tool, "--reset-gpu-clocks"], capture_output=True, check=False)
