"""The memory and the turns of CUDA graphs, which need no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_freescale.models.layer_graphs.arena import Arena, load
from lightning_freescale.models.layer_graphs.turn import Turn
from lightning_freescale.runtime.errors import FreeScaleError


def test_arrays_of_one_name_share_memory() -> None:
    arena = Arena(10, torch.device("cpu"))
    large, small = arena.take("x", 10, 4, torch.float32), arena.take("x", 3, 4, torch.float32)
    assert small.shape == (3, 4)
    assert small.is_contiguous()
    assert small.data_ptr() == large.data_ptr()
    assert arena.take("y", 3, 4, torch.float32).data_ptr() != large.data_ptr()
    more = arena.take("sums", 50, 2, torch.float32)  # not an array of rows
    assert more.shape == (50, 2)


def test_rows_that_are_in_their_place_are_not_copied() -> None:
    place = torch.zeros(2, 2)
    load(place, torch.ones(2, 2))
    assert place.eq(1).all()
    version = place._version
    load(place, place.detach())
    load(place, None)
    assert place._version == version


class Owner:
    """What a turn asks the graphs of its model for."""

    def __init__(self) -> None:
        self.turn: Any = None

    def current(self) -> Any:
        return self.turn


def test_a_turn_is_over_after_the_backward_of_all_layers() -> None:
    owner, keys = Owner(), torch.zeros(3, dtype=torch.int32)
    turn = owner.turn = Turn(owner, keys)  # type: ignore[arg-type]
    assert not turn.is_over()  # it has not begun
    turn.began = True
    turn.pending |= {0, 1}
    turn.check()
    turn.pending.discard(1)
    assert not turn.is_over()
    turn.pending.discard(0)
    assert turn.is_over()
    turn.load_keys(torch.tensor([1, 2, 3], dtype=torch.int32))
    turn.load_keys(torch.tensor([4, 5, 6], dtype=torch.int32))  # those of another layer are the same
    assert keys.tolist() == [1, 2, 3]
    owner.turn = Turn(owner, None)  # type: ignore[arg-type]
    with pytest.raises(FreeScaleError, match="cuda_graphs=False"):
        turn.check()
