"""Random states of the ranks in a checkpoint, so that a resumed run draws the numbers of the uninterrupted one.

Two moments count. The *current* state, at the time of the save, decides about dropout in the batches after it. The state at
the time when the loader was *opened* decided about the order of its samples and the seeds of its workers. A run that
resumes in the middle of an epoch opens its loader with the second, and trains its first batch with the first.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightning_freescale.runtime.log import log_once

RandomState = dict[str, Any]


def capture(device: torch.device) -> RandomState:
    """The states of the random generators of Python, NumPy, torch and ``device``, as tensors and plain numbers."""
    version, words, gauss = random.getstate()
    numbers = torch.from_numpy(np.array(words, dtype=np.int64))  # torch.tensor() takes many times as long for a tuple.
    state: RandomState = {"python": (version, numbers, gauss), "torch": torch.get_rng_state()}
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - the generator that user code draws from
    if name == "MT19937":
        state["numpy"] = (torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: RandomState, device: torch.device) -> None:
    """Set the random generators to ``state``. One that the state does not hold is left alone."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


class LoaderRandomStates:
    """The random states of one training loader: notes the one it is opened with, and restores those of a checkpoint.

    Args:
        device: the device of this rank.
        to_open: the state to open the loader with, of a checkpoint.
        to_train: the state to train the first batch with; ``None`` if the checkpoint was saved between two epochs.
    """

    def __init__(self, device: torch.device, to_open: RandomState | None = None, to_train: RandomState | None = None):
        self._device = device
        self._to_open, self._to_train = self._from_checkpoint = (to_open, to_train)
        self.opened: RandomState | None = None  # The state with which the loader was opened for this epoch.

    def before_reopen(self) -> None:
        """A loader of unknown length, which was opened before the training started, may be opened again."""
        if self.opened is not None:
            self._to_open, self._to_train = self._from_checkpoint

    def before_training(self) -> None:
        """The first epoch of this run is about to start."""
        to_open, to_train = self._from_checkpoint
        if self.opened is not None:
            self._to_open = self._to_train = None
            if to_train is not None:
                restore(to_train, self._device)  # Hooks may have drawn numbers since the first batch was fetched.
        elif to_train is None and to_open is not None:
            restore(to_open, self._device)  # Between two epochs: hooks draw numbers before the loader does.
            self._to_open = None

    def before_open(self) -> None:
        """The loader is about to be opened for an epoch."""
        if self._to_open is not None:
            restore(self._to_open, self._device)
            self._to_open = None
        self.opened = capture(self._device)

    def before_batch(self) -> None:
        """A batch is about to be handed out."""
        if self._to_train is not None:
            restore(self._to_train, self._device)
            self._to_train = None


def states_of_rank(saved: list[dict[str, Any]] | None, rank: int, world_size: int) -> dict[str, Any] | None:
    """The random states that rank ``rank`` resumes with; ``None`` if the checkpoint has none that fit."""
    if saved is None:
        return None
    if len(saved) != world_size:
        log_once(
            f"the checkpoint holds the random states of {len(saved)} ranks, but {world_size} ranks train: random numbers, "
            "such as those of dropout, are not the ones of the uninterrupted run"
        )
        return None
    return saved[rank]


def of_loader(resumed: dict[str, Any] | None, index: int, device: torch.device) -> LoaderRandomStates:
    """The random states of the training loader number ``index``.

    Args:
        resumed: the result of :func:`states_of_rank`.
    """
    if resumed is None:
        return LoaderRandomStates(device)
    opened, current = resumed["opened"], resumed["current"]
    if opened is None:  # Between two epochs. Only the first loader continues from the saved state.
        return LoaderRandomStates(device, to_open=current if index == 0 else None)
    return LoaderRandomStates(device, opened[index] if index < len(opened) else None, current)
