"""The variants of the end-to-end benchmark: one model trained on the same global batches in several ways.

TorchRec's pipelines train it, a Lightning Trainer with the strategy trains it, and its dense part runs alone. Each
variant is built, trained and freed before the next one, so that memory holds the table and the activations of one
variant only.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

import lightning_freescale as fs
from benchmarks.harness.gpu_cluster.transports import as_separate_host
from benchmarks.harness.lightning_trainer import plain_trainer
from benchmarks.harness.training.bubble import UNCOUNTED_LAST_STEPS
from benchmarks.harness.training.clicks import ClickBatch, ClickWorkload, TimestampedDLRM
from benchmarks.harness.training.context import ContextHSTU, context_tables, with_context
from benchmarks.harness.training.sent_bytes import SentBytes
from benchmarks.harness.training.steadiness import WARM_UP_BATCHES, WARM_UP_STEPS
from benchmarks.harness.training.step_timestamps import (
    ProfilerTrace,
    StepTimestamps,
    TimestampCallback,
    TimestampedHSTU,
)
from benchmarks.harness.variant_names import (
    ALL,
    ALL_OVER_NCCL,
    ALL_OVER_TCP,
    BALANCE,
    DENSE_ONLY,
    FREESCALE,
    PRIORITIZE,
    SM_FREE,
    SYNC,
    TORCHREC_BASE,
    TORCHREC_SPARSE_DIST,
)
from benchmarks.harness.workload import CONTEXT_ROWS, SAME_LENGTHS, ContextBatch, LongTailWorkload
from lightning_freescale.balance import CostModel
from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.embedding.shard import shard
from lightning_freescale.embedding.table_optimizer import DEFAULT_TABLE_OPTIMIZER

PIPELINES = {TORCHREC_BASE: TrainPipelineBase, TORCHREC_SPARSE_DIST: TrainPipelineSparseDist}
TRACED_STEPS = 3  # they follow the steps that count, after one step in which the profiler starts
_OFF: dict[str, Any] = {"balance": "off", "prioritize": False}
_ON: dict[str, Any] = {"balance": "fixed", "prioritize": True}
# Options of the strategy. "auto" chooses NCCL between nodes, so the SM-free transport has to be requested.
STRATEGIES: dict[str, dict[str, Any]] = {
    SYNC: _OFF,
    BALANCE: _OFF | {"balance": "fixed"},
    PRIORITIZE: _OFF | {"prioritize": True},
    SM_FREE: _OFF | {"transport": "host"},
    ALL_OVER_NCCL: _ON,
    ALL_OVER_TCP: _ON | {"transport": "host"},
    ALL: _ON | {"transport": "host"},
    FREESCALE: {},
}


# The ids are random and teach little. With these values the loss falls within a few steps all the same, which shows that every
# variant trains. They do not change the time of a step. The masks of dropout depend on the step that the Trainer counts, which
# TorchRec's pipelines do not have: without dropout the losses of all variants can be compared.
MODEL_OPTIONS: dict[str, Any] = {
    "dropout": 0.0,
    "input_dropout": 0.0,
    "table_std": None,
    "scale_input": False,
    "linear_init": "torch",
    "betas": (0.9, 0.999),
}


@dataclass(frozen=True)
class TrainingJob:
    """What to train, and for how long."""

    device: torch.device
    rank: int
    ranks: int
    workload: LongTailWorkload | ClickWorkload
    model: dict[str, Any]  # arguments of HSTU; a DLRM takes its embedding_dim
    steps: int
    timeout: float  # longest wait of a rank for another, seconds
    traces: Path | None = None  # folder for profiler traces
    options: dict[str, Any] = field(default_factory=dict)  # further options of the strategy for the variant "all"
    warm_up: int = 0  # number of first steps that do not count
    alternating: int = WARM_UP_STEPS  # number of last warm-up steps that have the lengths of two batches in turn

    def batch_of(self, step: int) -> int:
        """Number of the batch of a step.

        The warm-up trains on batches of the same lengths as those that count, with other ids, so that all shapes are known. In
        its last steps the lengths of the first batches that count alternate. No batch is repeated: a model overfits such a
        batch, the losses of the next ones are large, and differences of rounding grow from step to step.
        """
        if step >= self.warm_up:
            return step
        lengths = self.warm_up + step
        if step >= self.warm_up - self.alternating:
            lengths = self.warm_up + (step - self.warm_up) % WARM_UP_BATCHES
        return lengths + SAME_LENGTHS * (1 + step)

    @property
    def table_optimizer(self) -> dict[str, Any]:
        """The optimizer of the tables. On CUDA its rate is a tenth of the default one, for the reason given in ``make_model``."""
        default = DEFAULT_TABLE_OPTIMIZER
        return {**default, "lr": default["lr"] * (0.1 if self.device.type == "cuda" else 1.0)}

    def timestamps(self, variant: str) -> StepTimestamps:
        """Time stamps for one training. With ``traces``, steps that do not count are also traced on ranks 0 and 1."""
        trace = None
        if self.traces is not None and self.rank < 2:
            last = self.steps - UNCOUNTED_LAST_STEPS - 1
            name = variant.replace(" ", "_") + ("" if self.rank == 0 else "_device")
            trace = ProfilerTrace(self.traces / f"{name}.json", last - TRACED_STEPS + 1, last, with_host=self.rank == 0)
        return StepTimestamps(self.device, trace)

    def make_model(self, timestamps: StepTimestamps) -> Any:
        """The model, equal on every call and rank. Its tables are initialised when they are sharded."""
        pl.seed_everything(self.workload.seed, verbose=False)
        if isinstance(self.workload, ClickWorkload):
            dlrm = TimestampedDLRM(self.workload, self.model["embedding_dim"])
            dlrm.timestamps = timestamps
            return dlrm
        options = {"max_history": self.workload.longest, "meta_tables": True} | MODEL_OPTIONS | self.model
        if self.device.type == "cuda":
            # Adam divides each gradient by its size, so differences of rounding change the weights of a large model as much
            # as gradients do. With the default rate they grow from step to step, and the losses cannot be compared.
            options = {"lr": 5e-5} | options
        if self.workload.context:
            names = self.workload.context_names
            model: TimestampedHSTU = ContextHSTU(self.workload.rows, **options)
            model.context = context_tables(names, CONTEXT_ROWS, model.hparams["embedding_dim"])
        else:
            model = TimestampedHSTU(self.workload.rows, **options)
        model.timestamps = timestamps
        return model

    def flops(self, steps: Iterable[int]) -> float:
        """FLOPs of forward and backward of a global batch, mean over ``steps``."""
        model = self.make_model(self.timestamps(""))
        if isinstance(self.workload, ClickWorkload):
            return model.flops_per_sample() * self.workload.samples * self.ranks
        cost = CostModel(*model.cost_coefficients())
        totals = []
        for step in steps:
            lengths = torch.cat([self.workload.lengths(rank, step) for rank in range(self.ranks)]).numpy()
            totals.append(float(cost(lengths, (lengths - 1) * self.workload.negatives).sum()))
        return sum(totals) / len(totals)

    def autocast(self) -> torch.autocast:
        """The autocast of Lightning's ``bf16-mixed``; disabled on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda", cache_enabled=False)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class TrainedVariant:
    """What one training measured on this rank."""

    timestamps: StepTimestamps
    peak_bytes: int = 0  # device memory beyond what was allocated before
    sent_bytes: int = 0  # to other ranks, in all-to-alls
    dense_bytes: int | None = None  # size of the gradients of the dense compute; known to ``dense_alone`` only
    notes: dict[str, Any] = field(default_factory=dict)


class JobBatches:
    """This rank's batches of all steps; in pinned memory if there is a GPU, as a data loader would have left them."""

    def __init__(self, job: TrainingJob):
        workload, numbers = job.workload, [job.batch_of(step) for step in range(job.steps)]
        made = {number: workload.batch(job.rank, number, job.ranks) for number in sorted(set(numbers))}
        if job.device.type == "cuda":
            made = {number: batch.pin_memory() for number, batch in made.items()}
        self._batches = [made[number] for number in numbers]
        predicted = [[workload.predicted(rank, number) for rank in range(job.ranks)] for number in numbers]
        self.scales = [own[job.rank] * job.ranks / sum(own) for own in predicted]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[SeqBatch | ClickBatch]:
        for batch in self._batches:  # new objects on every pass: jagged tensors cache what they compute
            if isinstance(batch, ClickBatch):
                yield ClickBatch(batch.dense, _new(batch.features), batch.clicked)
            elif isinstance(batch, ContextBatch):
                yield ContextBatch(_new(batch.features), batch.timestamps, context=_new(batch.context))
            else:
                yield SeqBatch(_new(batch.features), batch.timestamps)

    def scaled(self) -> Iterator[ScaledBatch | ClickBatch]:
        """The batches with the factors of their losses, for TorchRec's pipelines."""
        for batch, scale in zip(self, self.scales, strict=True):
            yield batch if isinstance(batch, ClickBatch) else ScaledBatch(**vars(batch), scale=scale)


def _new(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    again = KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths())
    again.offset_per_key()  # computed on the host: on a GPU every variant would have to synchronize
    return again


@dataclass
class ScaledBatch(ContextBatch):
    """A batch with a factor for this rank's loss, which makes the mean over the ranks the mean over the global batch.

    The strategy weights the losses itself. A TorchRec user whose ranks have batches of unequal size has to write this.
    """

    scale: float = 1.0


def train(name: str, job: TrainingJob, batches: JobBatches, callbacks: Sequence[pl.Callback] = ()) -> TrainedVariant:
    """Train one variant and free it. A collective.

    Args:
        callbacks: callbacks of the Trainer, for the variants that have one. They run before the time stamps are taken.
    """
    gc.collect()
    job.synchronize()
    before = 0
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(job.device)
        before = torch.cuda.memory_allocated(job.device)
    dist.barrier()
    sent = SentBytes()
    with sent.counting():
        if name == DENSE_ONLY:
            trained = dense_alone(job, batches, job.timestamps(name))
        elif name in PIPELINES:
            trained = torchrec_pipeline(PIPELINES[name], job, batches, job.timestamps(name))
        else:
            options = STRATEGIES[name] | (job.options if name.startswith(ALL) else {})
            if isinstance(job.workload, ClickWorkload):  # all samples cost the same
                options = options | {"balance": "off"}
            with as_separate_host(job.rank) if name == ALL_OVER_TCP else nullcontext():
                trained = freescale(options, job, batches, job.timestamps(name), callbacks)
    trained.sent_bytes = sent.total
    job.synchronize()
    if job.device.type == "cuda":
        trained.peak_bytes = torch.cuda.max_memory_allocated(job.device) - before
    return trained


# ---- the variants ------------------------------------------------------------------------------------------------------------
def dense_alone(job: TrainingJob, batches: JobBatches, timestamps: StepTimestamps) -> TrainedVariant:
    """The dense compute of this rank's batches. The rows are already on the rank; nothing is exchanged."""
    model = job.make_model(timestamps)
    del model.embedding
    if isinstance(model, ContextHSTU):
        del model.context
    model.to(job.device)
    optimizer = model.configure_optimizers()
    for batch in batches:
        on_device = batch.to(job.device, non_blocking=True)
        embedded = model.random_rows(batch, on_device)
        timestamps.take("batch")
        with job.autocast():
            loss = model.loss(embedded, on_device)
        optimizer.zero_grad()
        loss.backward()
        timestamps.take("backward")
        timestamps.take("optimizer")
        optimizer.step()
        timestamps.take("end")
        del embedded, loss  # so that they are freed before the next step
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return TrainedVariant(timestamps, dense_bytes=sum(gradient.nbytes for gradient in gradients))


class _DensePart(nn.Module):
    """A model without its tables. It is a separate module, so that TorchRec's tracer does not trace into it."""

    def __init__(self, model: TimestampedHSTU | TimestampedDLRM, job: TrainingJob):
        super().__init__()
        self.model, self._job = model, job

    def forward(self, embedded: Any, batch: Any, pooled: Any = None) -> tuple[Tensor, Tensor]:
        with self._job.autocast():
            loss = self.model.loss(embedded if pooled is None else with_context(embedded, pooled), batch)
        return loss * batch.scale, loss.detach()


class _Preparation(nn.Module):
    """Computes what a model needs of a batch before the lookup. TorchRec's tracer does not trace into a separate module."""

    def __init__(self, model: TimestampedHSTU | TimestampedDLRM, job: TrainingJob):
        super().__init__()
        self._prepare, self._job = getattr(model, "prepare", None), job

    def forward(self, batch: Any) -> None:
        if self._prepare is not None:
            with self._job.autocast():
                self._prepare(batch)


class PipelinedModel(nn.Module):
    """A model as TorchRec's pipelines require it: a visible lookup, then the loss to train on and the loss to report."""

    def __init__(self, model: TimestampedHSTU | TimestampedDLRM, job: TrainingJob):
        super().__init__()
        self.embedding = model.embedding
        del model.embedding
        self.preparation, self.dense = _Preparation(model, job), _DensePart(model, job)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.preparation(batch)
        return self.dense(self.embedding(batch.features), batch)


class PipelinedContextHSTU(PipelinedModel):
    """The same with pooled context features."""

    def __init__(self, model: ContextHSTU, job: TrainingJob):
        context = model.context
        del model.context
        super().__init__(model, job)
        self.context = context

    def forward(self, batch: ScaledBatch) -> tuple[Tensor, Tensor]:
        self.preparation(batch)
        return self.dense(self.embedding(batch.features), batch, self.context(batch.context))


def torchrec_pipeline(kind: Any, job: TrainingJob, batches: JobBatches, timestamps: StepTimestamps) -> TrainedVariant:
    """One of TorchRec's training pipelines. Tables are sharded and initialised as by the strategy."""
    plain = job.make_model(timestamps)
    model = PipelinedContextHSTU(plain, job) if isinstance(plain, ContextHSTU) else PipelinedModel(plain, job)
    assert dist.group.WORLD is not None
    sharded = shard(model, dist.group.WORLD, job.device, optimizer=job.table_optimizer)
    optimizer = plain.configure_optimizers()

    def optimizer_begins(*_: Any) -> None:
        timestamps.take("backward")
        timestamps.take("optimizer")

    optimizer.register_step_pre_hook(optimizer_begins)
    pipeline, source = kind(sharded, optimizer, job.device), batches.scaled()
    for _ in range(len(batches)):
        timestamps.take("batch")
        pipeline.progress(source)
        timestamps.take("end")
    return TrainedVariant(timestamps)


def freescale(
    options: dict[str, Any],
    job: TrainingJob,
    batches: JobBatches,
    timestamps: StepTimestamps,
    callbacks: Sequence[pl.Callback] = (),
) -> TrainedVariant:
    """A Lightning Trainer with the strategy: what a user runs, without a logger."""
    model, callback = job.make_model(timestamps), TimestampCallback(timestamps)
    settings: dict[str, Any] = {"timeout": job.timeout, "embedding_optimizer": job.table_optimizer} | options
    strategy = fs.FreeScaleStrategy(**settings)
    os.environ["WORLD_SIZE"] = str(job.ranks)  # Lightning deletes it at the end of every fit
    trainer = plain_trainer(
        strategy,
        job.ranks,
        job.device.type == "cuda",
        max_steps=job.steps,
        callbacks=[*callbacks, callback],
    )
    trainer.fit(model, train_dataloaders=batches)
    notes = {"strategy": options, "prioritized": callback.prioritized}
    if strategy.mode_choice is not None:
        notes["verdict"] = str(strategy.mode_choice)
    return TrainedVariant(timestamps, notes=notes)
