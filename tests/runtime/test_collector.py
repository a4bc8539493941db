"""The garbage collector is as before when the package is imported."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator

import pytest

from lightning_freescale.runtime import collector


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    yield
    gc.enable()
    importlib.reload(collector).resume()


def test_the_import_has_ended_the_pause() -> None:
    assert gc.isenabled()


@pytest.mark.parametrize("before", [True, False])
def test_a_pause_restores_what_was_before(before: bool) -> None:
    (gc.enable if before else gc.disable)()
    paused = importlib.reload(collector)
    assert not gc.isenabled()
    paused.resume()
    assert gc.isenabled() == before
