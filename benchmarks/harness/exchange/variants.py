"""The variants of the exchange benchmark: four ways to train one model on the same batches, and its compute alone.

Each variant is a generator that does one training step per ``next``. All variants live in one process and alternate
after a few steps, so that disturbances of the machine affect all of them alike. The pipeline of a variant stays filled
while others run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from benchmarks.harness.exchange.machine import Machine
from benchmarks.harness.variant_names import (
    COMPUTE_ONLY,
    DENSE_ONLY,
    PRIORITIZED,
    SYNC,
    TORCHREC_BASE,
    TORCHREC_SPARSE_DIST,
)
from benchmarks.harness.workload import FEATURE, EqualCostWorkload, ExchangeBatch
from lightning_freescale.embedding.all_to_all import COLLISION, ExchangeGroups
from lightning_freescale.embedding.held_gradients import HeldTableGradients, MicroBatch
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.embedding.shard import shard
from lightning_freescale.embedding.stages import FetchingBatch
from lightning_freescale.embedding.zero_collision.collection import ZeroCollision, zero_collision
from lightning_freescale.embedding.zero_collision.sharded import ShardedZeroCollisionCollection
from lightning_freescale.runtime.streams import SideStream
from lightning_freescale.strategy.prepared_batch import PreparedBatch, copy_in_advance

Steps = Generator[Tensor, None, None]  # yields the loss of each step


class ExchangeModel(nn.Module):
    """One table and the dense part. Returns the loss twice, as TorchRec's pipelines require: to train on, and detached."""

    def __init__(self, workload: EqualCostWorkload, dense: nn.Module, ids: ZeroCollision | None = None):
        super().__init__()
        table = EmbeddingConfig(
            name="catalogue",
            embedding_dim=workload.dim,
            num_embeddings=workload.rows,
            feature_names=[FEATURE],
            weight_init_min=-1.0,  # large rows: a wrong row changes the loss visibly
            weight_init_max=1.0,
        )
        self.embeddings: Any = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        if ids is not None:
            self.embeddings = zero_collision(self.embeddings, {table.name: ids})
        self.dense = dense

    def forward(self, batch: ExchangeBatch) -> tuple[Tensor, Tensor]:
        loss = self.dense(self.embeddings(batch.features)[FEATURE].values())
        return loss, loss.detach()


def build(
    workload: EqualCostWorkload,
    machine: Machine,
    group: dist.ProcessGroup,
    ids: ZeroCollision | None = None,
    placement: Mapping[str, Any] | None = None,
) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """The model with its table sharded over ``group``, and its dense optimizer. The weights are equal on every call."""
    torch.manual_seed(1)
    model = ExchangeModel(workload, machine.dense(workload.dim), ids)
    sharded = shard(
        model, group, machine.device, **(placement or {"sharding": "row_wise"})
    )  # as the strategy shards it
    return sharded, machine.optimizer(model.dense.parameters())


# ---- the variants ------------------------------------------------------------------------------------------------------------
def dense_alone(workload: EqualCostWorkload, machine: Machine, batches: Sequence[ExchangeBatch]) -> Steps:
    """The dense compute, AllReduce and optimizer only. The rows are already on the rank, and their gradient is not sent."""
    rows = torch.randn(workload.ids_per_rank, workload.dim, device=machine.device, requires_grad=True)
    return _alone(workload, machine, batches, lambda batch: rows)


def compute_alone(
    workload: EqualCostWorkload, machine: Machine, batches: Sequence[ExchangeBatch], window: int = 1
) -> Steps:
    """All compute of a rank without the exchange: the same number of ids, looked up in a table as large as the rank's shard.

    Args:
        window: micro-batches of an optimizer step. Rows are updated after each of them.
    """
    rows, cuda = workload.rows // dist.get_world_size(), machine.device.type == "cuda"
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (
                rows,
                workload.dim,
                EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST,
                ComputeDevice.CUDA if cuda else ComputeDevice.CPU,
            )
        ],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.02,
        pooling_mode=PoolingMode.NONE,
        device=machine.device,
    )
    table.init_embedding_weights_uniform(-1.0, 1.0)

    def look_up(batch: ExchangeBatch) -> Tensor:
        features = batch.to(machine.device, non_blocking=True).features
        return table(features.values() % rows, features.offsets().to(torch.int64))

    return _alone(workload, machine, batches, look_up, window)


def _alone(
    workload: EqualCostWorkload,
    machine: Machine,
    batches: Sequence[ExchangeBatch],
    rows_of: Callable[[ExchangeBatch], Tensor],
    window: int = 1,
) -> Steps:
    torch.manual_seed(1)
    model = DistributedDataParallel(  # with the settings of DistributedModelParallel
        machine.dense(workload.dim), gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=25
    )
    optimizer = machine.optimizer(model.parameters())

    def steps() -> Steps:
        for number, batch in enumerate(batches):
            rows = rows_of(batch)
            if number % window == 0:
                optimizer.zero_grad()
            rows.grad = None
            loss = model(rows)
            loss.backward()
            if (number + 1) % window == 0:
                optimizer.step()
            yield loss.detach()

    return steps()


def torchrec_pipeline(
    kind: Any, workload: EqualCostWorkload, machine: Machine, batches: Sequence[ExchangeBatch]
) -> Steps:
    """One of TorchRec's own training pipelines."""
    pipeline = kind(*build(workload, machine, machine.sharding_group()), machine.device)

    def steps() -> Steps:
        source = iter(batches)
        for _ in batches:
            yield pipeline.progress(source)

    return steps()


class FreeScaleSteps:
    """The strategy's training step without Lightning: the same hooks in the same order.

    Args:
        prioritize: with the schedule (``prioritize=True``) or without it (``freescale_sync``).
        group: the ranks over which the table is sharded.
        ids: how the table gives rows to raw ids; ``None`` for dense ids.
        placement: options of ``shard``; row-wise by default.
        window: micro-batches of an optimizer step.
    """

    def __init__(
        self,
        prioritize: bool,
        workload: EqualCostWorkload,
        machine: Machine,
        group: dist.ProcessGroup,
        ids: ZeroCollision | None = None,
        placement: Mapping[str, Any] | None = None,
        window: int = 1,
    ):
        self._device = machine.device
        self._model, self._optimizer = build(workload, machine, group, ids, placement)
        self._copies = SideStream(machine.device)
        self.schedule: ExchangeSchedule | None = None
        kind = ShardedEmbeddingCollection if ids is None else ShardedZeroCollisionCollection
        modules: Any = {name: module for name, module in self._model.named_modules() if isinstance(module, kind)}
        self.embeddings = next(iter(modules.values()))
        if prioritize:
            self.schedule = ExchangeSchedule(
                modules, ExchangeGroups(machine.exchange_group("high"), machine.exchange_group("low")), self._copies
            )
        self._window, self._trained = window, 0  # micro-batches
        self._held = HeldTableGradients(self._model) if window > 1 else None
        self.prefetched: list[int] = []  # after each step: bytes of rows that are held for the next one
        self.collisions: list[float] = []  # after each step: share of those rows that waited for its gradients

    def steps(self, batches: Sequence[ExchangeBatch]) -> Steps:
        """Train on ``batches``, one step per ``next``."""
        source, ahead = iter(batches), deque[PreparedBatch]()
        while True:
            for batch in source:
                ahead.append(self._stage(batch))
                if len(ahead) == 3:  # the batch of this step and the two that the schedule prefetches for
                    break
            if not ahead:
                return
            yield self._step(ahead.popleft().use(), [prepared.batch for prepared in ahead])

    def _stage(self, batch: ExchangeBatch) -> PreparedBatch:
        moved, copied = copy_in_advance(lambda: batch.to(self._device, non_blocking=True), self._copies)
        return PreparedBatch(moved, 0, copied=copied)

    def _step(self, batch: ExchangeBatch, ahead: list[ExchangeBatch]) -> Tensor:
        schedule, micro_batch = self.schedule, self._begin_micro_batch()
        if schedule is not None:
            soon, later = ([part.features for part in ahead[k : k + 1]] for k in (0, 1))
            schedule.begin_step([batch.features], soon, later, micro_batch)
        loss, seen = self._model(batch)
        if (self._trained - 1) % self._window == 0:
            self._optimizer.zero_grad()
        if schedule is not None:
            schedule.before_backward()
        loss.backward()
        if schedule is not None:
            schedule.after_backward()
            self._record(schedule)
        if micro_batch is not None and micro_batch.last and not micro_batch.held.all_applied:
            micro_batch.held.apply()
        if micro_batch is None or micro_batch.last:
            self._optimizer.step()
        return seen

    def _begin_micro_batch(self) -> MicroBatch | None:
        """None if no gradients are accumulated. All windows are complete."""
        place, self._trained = self._trained % self._window, self._trained + 1
        if self._held is None:
            return None
        if place == 0:
            self._held.drop()
        self._held.hold(True)
        return MicroBatch(self._held, place, self._window, place == self._window - 1)

    def _record(self, schedule: ExchangeSchedule) -> None:
        """Record what is held for the next step. All of its rows have been requested by now."""
        state = schedule.modules[0].current
        received = {
            piece: [transfer.received for transfer in transfers]
            for piece, transfers in (state.transfers if isinstance(state, FetchingBatch) else {}).items()
        }
        rows = {piece: sum(len(part) for part in parts) for piece, parts in received.items()}
        self.prefetched.append(sum(part.nbytes for parts in received.values() for part in parts))
        self.collisions.append(rows.get(COLLISION, 0) / max(1, sum(rows.values())))


def make_variants(
    workload: EqualCostWorkload, machine: Machine, batches: Sequence[ExchangeBatch]
) -> tuple[dict[str, Steps], FreeScaleSteps]:
    """All variants by name, and the prioritized one for its records. A collective."""
    prioritized = FreeScaleSteps(True, workload, machine, machine.exchange_group("low"))
    variants = {
        DENSE_ONLY: dense_alone(workload, machine, batches),
        COMPUTE_ONLY: compute_alone(workload, machine, batches),
        TORCHREC_BASE: torchrec_pipeline(TrainPipelineBase, workload, machine, batches),
        TORCHREC_SPARSE_DIST: torchrec_pipeline(TrainPipelineSparseDist, workload, machine, batches),
        SYNC: FreeScaleSteps(False, workload, machine, machine.sharding_group()).steps(batches),
        PRIORITIZED: prioritized.steps(batches),
    }
    return variants, prioritized
