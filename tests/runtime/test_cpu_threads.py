"""On a GPU, PyTorch uses one CPU thread in a training process, unless the user has chosen a number."""

from __future__ import annotations

import pytest
import torch

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.runtime import cpu_threads
from tests.ranks import run_ranks

CUDA = torch.device("cuda")


def _threads(rank: int, kind: str) -> int:
    torch.set_num_threads(3)
    cpu_threads.use_one(torch.device(kind))
    return torch.get_num_threads()


def test_one_thread_on_a_gpu_and_as_many_as_before_on_a_cpu() -> None:
    assert run_ranks(_threads, 1, ("cuda",)) == [1]
    assert run_ranks(_threads, 1, ("cpu",)) == [3]


class _WithoutRanks(FreeScaleStrategy):
    """Its ranks would use GPUs."""

    @property
    def root_device(self) -> torch.device:
        return CUDA


def test_a_number_that_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[torch.device] = []
    monkeypatch.setattr(cpu_threads, "use_one", changed.append)
    for chosen in ("4", None):
        monkeypatch.delenv(cpu_threads.VARIABLE, raising=False)
        if chosen is not None:
            monkeypatch.setenv(cpu_threads.VARIABLE, chosen)
        strategy = _WithoutRanks()
        monkeypatch.setenv(cpu_threads.VARIABLE, "16")  # as Lightning does when it starts the ranks
        with pytest.raises(AttributeError):  # there is no cluster to connect to
            strategy.setup_environment()
        assert changed == ([] if chosen else [CUDA])
