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


@pytest.mark.parametrize("frozen", [True, False])
def test_the_next_collection_does_not_go_through_what_was_imported(frozen: bool) -> None:
    """Unless the user has frozen objects, which stay frozen."""
    before = gc.get_freeze_count()  # conftest.py freezes what was imported before
    if not frozen:
        gc.unfreeze()
    paused = importlib.reload(collector)
    created = [[] for _ in range(100)]  # type: ignore[var-annotated]
    paused.resume()
    youngest = {id(found) for found in gc.get_objects(generation=0)}
    assert bool(youngest & set(map(id, created))) == frozen
    assert gc.get_freeze_count() == (before if frozen else 0)
    gc.freeze()
