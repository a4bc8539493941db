"""Compile a header of the kernels for a CPU, beside files that stand in for the others."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.models.hopper.loading import FOLDER

COMPILER = shutil.which("g++") or shutil.which("clang++")


def compile_emulation(folder: Path, emulation: Path, header: str, definitions: Sequence[str] = ()) -> Path:
    """Compile ``main.cpp`` of ``emulation`` with ``header`` of the kernels in ``folder``, and return the program."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    # A header is first looked for beside the file that includes it.
    for source in (FOLDER / header, emulation.with_name("block.h"), *emulation.iterdir()):
        shutil.copy(source, folder)
    flags = ["-O1", "-std=c++20", "-Wno-unknown-pragmas", *definitions]
    command = [COMPILER, *flags, str(folder / "main.cpp"), "-o", str(folder / "main")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "unrecognized" in done.stderr or "invalid value" in done.stderr:
        pytest.skip("the C++ compiler has no C++20")
    assert done.returncode == 0, done.stderr
    return folder / "main"
