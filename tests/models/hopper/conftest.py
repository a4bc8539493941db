"""Compiles the kernels of the tests on a GPU at the same time. One after the other, that takes minutes."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.models.hopper.loading import compile_kernels, hopper

HERE = Path(__file__).parent
MANY_TESTS = 50  # Fewer tests need few kernels, and compile them.
WIDTHS = (32, 64, 128, 256)


@pytest.fixture(scope="session", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    own = [item for item in request.session.items if item.path.parent == HERE and "gpu" in item.keywords]
    if len(own) < MANY_TESTS or not hopper.available():
        return
    sizes = itertools.product(WIDTHS, WIDTHS, (False, True), (False, True))
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:  # The processes do not use CUDA.
        list(pool.map(compile_kernels, *zip(*sizes, strict=True)))
