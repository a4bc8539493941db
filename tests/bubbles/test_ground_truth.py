"""Delays that a test adds to the training appear in the right part of the bubble, with the right length, and in no other part."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from lightning_freescale.bubbles.attribution import PARTS, account, attribute
from lightning_freescale.bubbles.records import read_run
from tests import toy
from tests.bubbles.monitored_fit import fit
from tests.ranks import run_ranks

DELAY = 0.3  # seconds; large compared with the noise of a machine that runs other tests
ATTEMPTS = 4  # Each has twice the delay of the one before, in case another program uses the cores.
STEPS = 12
DELAYED = (4, 6, 8, 10)  # indices of the delayed batches; the batches between them are not delayed
Sleeps = list[tuple[float, float]]


def sleep(seen: Sleeps) -> None:
    began = time.monotonic()
    time.sleep(DELAY)
    seen.append((began, time.monotonic()))


class SlowCompute(toy.Model):
    """The ranks ``ranks`` compute longer."""

    def __init__(self, seen: Sleeps, ranks: tuple[int, ...]):
        super().__init__()
        self.sleeps, self.ranks = seen, ranks

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        if batch_idx in DELAYED and self.global_rank in self.ranks:
            sleep(self.sleeps)
        return super().training_step(batch, batch_idx)


class SlowLink(toy.Model):
    """The rows take longer to arrive, on every rank."""

    def __init__(self, seen: Sleeps, ranks: tuple[int, ...]):
        super().__init__()
        self.sleeps = seen

    def on_train_start(self) -> None:
        for output_dist in self.embeddings._output_dists:
            output_dist.register_forward_hook(self._delay)

    def _delay(self, module: Any, args: Any, awaitable: Any) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1 in DELAYED:
            awaitable.callbacks.append(lambda rows: (sleep(self.sleeps), rows)[1])


class SlowSorting(SlowLink):
    """Sorting the rows by rank, before they are sent, takes longer on every rank."""

    def on_train_start(self) -> None:
        for output_dist in self.embeddings._output_dists:
            output_dist._dist.register_forward_pre_hook(self._sort)

    def _sort(self, module: Any, args: Any) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1 in DELAYED:
            sleep(self.sleeps)


class SlowGradients(SlowLink):
    """The gradients of the rows take longer to arrive at their owners, on every rank."""

    def on_train_start(self) -> None:
        for output_dist in self.embeddings._output_dists:
            output_dist.register_forward_pre_hook(self._delay_back)

    def _delay_back(self, module: Any, args: Any) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1 in DELAYED:
            args[0].register_hook(lambda gradient: sleep(self.sleeps))


class SlowAllReduce(toy.Model):
    """The AllReduce of the dense gradients takes longer, on every rank, while no rank computes."""

    def __init__(self, seen: Sleeps, ranks: tuple[int, ...]):
        super().__init__()
        self.sleeps = seen

    def on_train_start(self) -> None:
        self.trainer.strategy.model.register_comm_hook(None, self._reduce)

    def _reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types, not with strings
        slow = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1 in DELAYED
        done: torch.futures.Future = torch.futures.Future()
        buffer = bucket.buffer().div_(dist.get_world_size())

        def reduced(future: Any) -> None:
            began = time.monotonic()

            def arrive() -> None:
                if slow:
                    self.sleeps.append((began, time.monotonic()))
                done.set_result(future.value()[0])

            threading.Timer(DELAY if slow else 0.0, arrive).start()

        dist.all_reduce(buffer, async_op=True).get_future().add_done_callback(reduced)
        return done


class SlowLoader:
    """The batches of the ranks ``ranks`` come late."""

    def __init__(self, seen: Sleeps, ranks: tuple[int, ...]):
        self.sleeps, self.ranks = seen, ranks
        self.batches = 0

    def __call__(self, samples: Any) -> toy.Batch:
        self.batches += 1
        if self.batches - 1 in DELAYED and dist.get_rank() in self.ranks:
            sleep(self.sleeps)
        return toy.collate(samples)


def train(rank: int, folder: Path, delay: Any, ranks: tuple[int, ...]) -> Sleeps:
    seen: Sleeps = []
    made = delay(seen, ranks)
    is_model = isinstance(made, pl.LightningModule)
    loader = torch.utils.data.DataLoader(
        toy.Samples(256), batch_size=2, collate_fn=toy.collate if is_model else made, shuffle=True
    )
    fit(
        2,
        model=made if is_model else None,
        loader=loader,
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=STEPS,
        max_epochs=1,
        max_steps=STEPS,
    )
    return seen


def measured(folder: Path, sleeps: list[Sleeps]) -> list[dict[str, float]]:
    """For each rank and part: the difference between delayed and other steps, as a share of the delay."""
    run = read_run(folder)
    steps = [run.step(index) for index in run.indices]
    bubbles = attribute(np.stack([[account(step[rank]) for step in steps] for rank in range(run.ranks)]))
    total = sum(bubbles.parts.values())
    assert np.allclose(total, bubbles.bubble, rtol=0.02)
    slept = np.array(
        [
            [
                sum(max(0.0, min(e, step.end) - max(s, step.start)) for s, e in sleeps[rank])
                for rank, step in enumerate(one)
            ]
            for one in steps
        ]
    )  # [steps, ranks]
    delayed = slept.max(axis=1) > DELAY / 2
    assert 3 <= delayed.sum() <= len(DELAYED)
    assert (~delayed).sum() >= 4
    injected = np.median(slept[delayed].max(axis=1))
    return [
        {
            part: float(np.median(values[rank, delayed]) - np.median(values[rank, ~delayed])) / injected
            for part, values in bubbles.parts.items()
        }
        for rank in range(run.ranks)
    ]


def agrees(found: list[dict[str, float]], expected: list[str | None]) -> bool:
    """Whether each rank has the whole delay in the expected part and none of it in other parts, within 10%."""
    return all(
        abs(share - (part == wanted)) < 0.1
        for parts, wanted in zip(found, expected, strict=True)
        for part, share in parts.items()
    )


CASES = {
    "one rank computes longer": (SlowCompute, (1,), ["straggler", None]),
    "both ranks compute longer": (SlowCompute, (0, 1), [None, None]),  # slow compute is not bubble
    "the link is slow": (SlowLink, (0, 1), ["exposed_embedding"] * 2),
    "rows are sorted slowly": (SlowSorting, (0, 1), ["exposed_embedding"] * 2),
    "the link is slow on the way back": (SlowGradients, (0, 1), ["exposed_embedding"] * 2),
    "the AllReduce is slow": (SlowAllReduce, (0, 1), ["exposed_dense"] * 2),
    "all loaders stall": (SlowLoader, (0, 1), ["input_wait"] * 2),
    "one loader stalls": (SlowLoader, (0,), ["input_wait", "straggler"]),
}


@pytest.mark.slow  # It compares measured times, which needs a machine that is not busy.
@pytest.mark.parametrize("case", CASES)
def test_a_delay_appears_in_the_right_part(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delay, ranks, expected = CASES[case]
    for seconds in DELAY * 2.0 ** np.arange(ATTEMPTS):
        monkeypatch.setattr(f"{__name__}.DELAY", seconds)
        folder = tmp_path / str(seconds)
        found = measured(folder, run_ranks(train, args=(folder, delay, ranks)))
        if agrees(found, expected):
            break
    assert agrees(found, expected), found
    for part in PARTS:  # show that the check can fail
        assert not agrees(found, [part if wanted != part else None for wanted in expected])
