"""Objects that the garbage collector does not look at while a model is trained."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import lightning.pytorch as pl
import pytest

from lightning_freescale.runtime.frozen_objects import FROZEN_BY_PYTHON, FrozenObjects
from tests import toy
from tests.ranks import run_ranks


class Cycle:
    """Refers to itself, so that the collector alone can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    """The test suite itself freezes objects before it forks ranks."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.freeze()


def test_garbage_is_collected_before_and_after() -> None:
    before = weakref.ref(Cycle())
    frozen = FrozenObjects()
    frozen.freeze()
    assert before() is None
    after = weakref.ref(Cycle())
    gc.collect()
    assert after() is None
    frozen.release()
    assert not gc.get_freeze_count()


def test_a_collection_does_not_look_at_frozen_objects() -> None:
    kept = Cycle()
    reference, frozen = weakref.ref(kept), FrozenObjects()
    frozen.freeze()
    del kept
    gc.collect()
    assert reference() is not None  # it would be freed otherwise
    frozen.release()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("disabled", [True, False])
def test_what_the_user_has_set_up_stays(disabled: bool) -> None:
    frozen = FrozenObjects()
    if disabled:
        gc.disable()
    else:
        gc.freeze()
    try:
        count = gc.get_freeze_count()
        assert disabled or count > FROZEN_BY_PYTHON
        garbage = weakref.ref(Cycle())
        frozen.freeze()
        assert gc.get_freeze_count() == count
        assert (garbage() is not None) is disabled
        frozen.release()
        assert gc.get_freeze_count() == count
    finally:
        gc.enable()


def test_python_itself_has_frozen_few_objects() -> None:
    """In a new process of Python 3.12 some hundred objects are frozen."""
    count = subprocess.run(
        [sys.executable, "-c", "import gc; print(gc.get_freeze_count())"], capture_output=True, check=True
    )
    assert int(count.stdout) < FROZEN_BY_PYTHON / 2


def test_objects_that_python_has_frozen_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before, frozen = weakref.ref(Cycle()), FrozenObjects()
    with monkeypatch.context() as patched:
        patched.setattr(gc, "get_freeze_count", lambda: 375)
        frozen.freeze()
    assert before() is None
    assert gc.get_freeze_count()
    frozen.release()
    assert not gc.get_freeze_count()


class FreezeAtStart(pl.Callback):
    """Does what the strategy does on a GPU, and looks whether it has done so."""

    count = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        FreezeAtStart.count = gc.get_freeze_count()
        trainer.strategy._frozen_objects.freeze()
        assert gc.get_freeze_count()


def _train(rank: int) -> tuple[int, int]:
    gc.unfreeze()
    toy.trainer("freescale", 2, callbacks=[FreezeAtStart()], max_steps=2).fit(toy.Model(), toy.loader())
    return FreezeAtStart.count, gc.get_freeze_count()


def test_the_end_of_a_training_releases_them() -> None:
    assert run_ranks(_train, 2) == [(0, 0)] * 2  # The strategy itself freezes nothing on a CPU.
