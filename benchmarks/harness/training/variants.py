"""The sides of the end-to-end benchmark: one HSTU trained on the same global batches by TorchRec's pipelines, by a Lightning
Trainer with the strategy, and its dense compute alone.

A side is built, trained and freed before the next: the table and the activations of one are all that is in memory.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

import lightning_freescale as fs
from benchmarks.harness.gpu_cluster.launcher import own_host
from benchmarks.harness.lightning_trainer import plain_trainer
from benchmarks.harness.training.bubble import (
    ALL,
    BALANCE,
    BASE,
    DEFAULT,
    DENSE,
    OVER_NCCL,
    OVER_TCP,
    PRIORITIZE,
    SM_FREE,
    SPARSE_DIST,
    SYNC,
)
from benchmarks.harness.training.step_timestamps import MarkedHSTU, Marker, Marks, Trace
from benchmarks.harness.workload import LongTail
from lightning_freescale.batch.seq_batch import HISTORY, NEGATIVES, SeqBatch
from lightning_freescale.embedding.shard import shard

PIPELINES = {BASE: TrainPipelineBase, SPARSE_DIST: TrainPipelineSparseDist}
_OFF: dict[str, Any] = {"balance": "off", "prioritize": False}
_ON: dict[str, Any] = {"balance": "fixed", "prioritize": True}
# NCCL is what "auto" takes between nodes; what moves by copy engines must be asked for there.
STRATEGIES: dict[str, dict[str, Any]] = {
    SYNC: _OFF,
    BALANCE: _OFF | {"balance": "fixed"},
    PRIORITIZE: _OFF | {"prioritize": True},
    SM_FREE: _OFF | {"transport": "host"},
    OVER_NCCL: _ON,
    OVER_TCP: _ON | {"transport": "host"},
    ALL: _ON | {"transport": "host"},
    DEFAULT: {},
}


@dataclass(frozen=True)
class Job:
    """What to train, and for how long."""

    device: torch.device
    rank: int
    ranks: int
    workload: LongTail
    model: dict[str, Any]  # arguments of HSTU
    steps: int
    timeout: float  # seconds that a rank waits for another
    traces: Path | None = None  # folder for traces of rank 0, of some steps of each side
    options: dict[str, Any] = field(default_factory=dict)  # more of the strategy's, where all techniques are on

    def marks(self, side: str) -> Marks:
        """For one training; takes a trace of three of its last steps, if traces are wanted."""
        trace = None
        if self.traces is not None and self.rank == 0:
            last = self.steps - 5
            trace = Trace(self.traces / f"{side.replace(' ', '_')}.json", max(1, last - 2), last)
        return Marks(self.device, trace)

    def hstu(self, marks: Marks) -> MarkedHSTU:
        """The model, equal on every call and rank; its table is drawn where it is sharded."""
        pl.seed_everything(self.workload.seed, verbose=False)
        model = MarkedHSTU(self.workload.rows, max_history=self.workload.longest, meta_tables=True, **self.model)
        model.marks = marks
        return model

    def autocast(self) -> torch.autocast:
        """As Lightning's ``bf16-mixed`` has it; nothing on CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda", cache_enabled=False)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class Trained:
    """What a side shows on this rank."""

    marks: Marks
    peak_bytes: int = 0  # of device memory, beyond what was allocated before
    notes: dict[str, Any] = field(default_factory=dict)


class Batches:
    """This rank's batches of all steps, in page-locked memory where there is a GPU; a loader would have done that."""

    def __init__(self, job: Job):
        workload = job.workload
        self._batches = [workload.batch(job.rank, step, job.ranks) for step in range(job.steps)]
        if job.device.type == "cuda":
            self._batches = [batch.pin_memory() for batch in self._batches]
        predicted = [[workload.predicted(rank, step) for rank in range(job.ranks)] for step in range(job.steps)]
        self.scales = [own[job.rank] * job.ranks / sum(own) for own in predicted]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[SeqBatch]:
        for batch in self._batches:  # a new object on every pass: jagged tensors keep what they have worked out
            features = batch.features
            again = KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths())
            again.offset_per_key()  # on the host, where it is free: on a GPU, every side would wait for it
            yield SeqBatch(again, batch.timestamps)

    def scaled(self) -> Iterator[ScaledBatch]:
        for batch, scale in zip(self, self.scales, strict=True):
            yield ScaledBatch(batch.features, batch.timestamps, scale=scale)


@dataclass
class ScaledBatch(SeqBatch):
    """With the factor of this rank's loss that makes the mean over ranks the mean over the global batch.

    The strategy weights losses itself; a TorchRec user whose ranks have unequal batches writes this.
    """

    scale: float = 1.0

    def to(self, device: torch.device, non_blocking: bool = False) -> ScaledBatch:
        return ScaledBatch(**vars(super().to(device, non_blocking)), scale=self.scale)


def train(name: str, job: Job, batches: Batches, callbacks: Sequence[pl.Callback] = ()) -> Trained:
    """Train one side and free it. A collective.

    Args:
        callbacks: of the Trainer, where there is one; they come before the marks.
    """
    gc.collect()
    job.settle()
    before = 0
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(job.device)
        before = torch.cuda.memory_allocated(job.device)
    dist.barrier()
    if name == DENSE:
        trained = dense_alone(job, batches, job.marks(name))
    elif name in PIPELINES:
        trained = torchrec_pipeline(PIPELINES[name], job, batches, job.marks(name))
    else:
        options = STRATEGIES[name] | (job.options if name == ALL else {})
        with own_host(job.rank) if name == OVER_TCP else nullcontext():
            trained = freescale(options, job, batches, job.marks(name), callbacks)
    job.settle()
    if job.device.type == "cuda":
        trained.peak_bytes = torch.cuda.max_memory_allocated(job.device) - before
    return trained


# ---- the sides ---------------------------------------------------------------------------------------------------------------
def dense_alone(job: Job, batches: Batches, marks: Marks) -> Trained:
    """The dense compute of every rank's own batches with the rows already local: no exchange of any kind."""
    model = job.hstu(marks)
    del model.embedding
    model.to(job.device)
    optimizer = model.configure_optimizers()
    for batch in batches:
        on_device = batch.to(job.device, non_blocking=True)
        embedded = {}
        for key in (HISTORY, NEGATIVES):
            lengths, count = on_device.features[key].lengths(), batch.features[key].values().numel()
            rows = torch.randn(count, model.hparams["embedding_dim"], device=job.device, requires_grad=True)
            embedded[key] = JaggedTensor(rows, lengths=lengths)
        marks.mark("batch")
        with job.autocast():
            loss = model.loss(embedded, on_device)
        optimizer.zero_grad()
        loss.backward()
        marks.mark("backward")
        marks.mark("optimizer")
        optimizer.step()
        marks.mark("end")
        del embedded, loss  # not beside those of the next step
    return Trained(marks)


class _Dense(nn.Module):
    """All of HSTU but the table. A module of its own, so that TorchRec's tracer does not look inside."""

    def __init__(self, model: MarkedHSTU, job: Job):
        super().__init__()
        self.model, self._job = model, job

    def forward(self, embedded: Any, batch: ScaledBatch) -> tuple[Tensor, Tensor]:
        with self._job.autocast():
            loss = self.model.loss(embedded, batch)
        return loss * batch.scale, loss.detach()


class PipelinedHSTU(nn.Module):
    """HSTU as TorchRec's pipelines want a model: the lookup in sight, a batch to the loss to train on and one to look at."""

    def __init__(self, model: MarkedHSTU, job: Job):
        super().__init__()
        self.embedding = model.embedding
        del model.embedding
        self.dense = _Dense(model, job)

    def forward(self, batch: ScaledBatch) -> tuple[Tensor, Tensor]:
        return self.dense(self.embedding(batch.features), batch)


def torchrec_pipeline(kind: Any, job: Job, batches: Batches, marks: Marks) -> Trained:
    """One of TorchRec's own training pipelines, on tables that are sharded and filled as the strategy does it."""
    hstu = job.hstu(marks)
    model = PipelinedHSTU(hstu, job)
    assert dist.group.WORLD is not None
    sharded = shard(model, dist.group.WORLD, job.device)  # as the strategy has it
    optimizer = hstu.configure_optimizers()

    def optimizer_begins(*_: Any) -> None:
        marks.mark("backward")
        marks.mark("optimizer")

    optimizer.register_step_pre_hook(optimizer_begins)
    pipeline, source = kind(sharded, optimizer, job.device), batches.scaled()
    for _ in range(len(batches)):
        marks.mark("batch")
        pipeline.progress(source)
        marks.mark("end")
    return Trained(marks)


def freescale(
    options: dict[str, Any], job: Job, batches: Batches, marks: Marks, callbacks: Sequence[pl.Callback] = ()
) -> Trained:
    """A Lightning Trainer with the strategy: all that a user runs, without a logger."""
    model, marker = job.hstu(marks), Marker(marks)
    strategy = fs.FreeScaleStrategy(timeout=job.timeout, **options)
    # Lightning takes it away at the end of every fit.
    os.environ["WORLD_SIZE"] = str(job.ranks)
    trainer = plain_trainer(
        strategy,
        job.ranks,
        job.device.type == "cuda",
        max_steps=job.steps,
        callbacks=[*callbacks, marker],
    )
    trainer.fit(model, train_dataloaders=batches)
    notes = {"strategy": options, "prioritized": marker.prioritized}
    if strategy.verdict is not None:
        notes["verdict"] = str(strategy.verdict)
    return Trained(marks, notes=notes)
