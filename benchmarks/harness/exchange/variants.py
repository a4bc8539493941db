"""The sides of the exchange benchmark: four ways to train one model on the same batches, and its compute alone.

Each side is a generator that takes one training step per ``next``. All live in one process and run a few steps at a time in
turn, so that whatever disturbs the machine disturbs them alike; a side's pipeline stays filled while the others run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
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
from benchmarks.harness.workload import FEATURE, Batch, Workload
from lightning_freescale.embedding.schedule import Schedule
from lightning_freescale.embedding.shard import shard
from lightning_freescale.embedding.stages import COLLISION, Groups
from lightning_freescale.runtime.streams import SideStream
from lightning_freescale.strategy import staging

DENSE = "dense alone"
COMPUTE = "compute alone"
BASE = "TrainPipelineBase"
SPARSE_DIST = "TrainPipelineSparseDist"
SYNC = "freescale_sync"
PRIORITIZED = "prioritized"
SIDES = (BASE, SPARSE_DIST, SYNC, PRIORITIZED)

Steps = Generator[Tensor, None, None]  # the loss of each step


class Model(nn.Module):
    """One table and the dense part. Returns the loss twice, as TorchRec's pipelines want it: to train on, and to look at."""

    def __init__(self, workload: Workload, dense: nn.Module):
        super().__init__()
        table = EmbeddingConfig(
            name="catalogue",
            embedding_dim=workload.dim,
            num_embeddings=workload.rows,
            feature_names=[FEATURE],
            weight_init_min=-1.0,  # rows that matter to the loss: a wrong one shows
            weight_init_max=1.0,
        )
        self.embeddings = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.dense = dense

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = self.dense(self.embeddings(batch.features)[FEATURE].values())
        return loss, loss.detach()


def build(
    workload: Workload, machine: Machine, group: dist.ProcessGroup
) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """The model, its table spread over ``group``, and its dense optimizer: equal on every call."""
    torch.manual_seed(1)
    model = Model(workload, machine.dense(workload.dim))
    sharded = shard(model, group, machine.device, sharding="row_wise")  # as the strategy has it
    return sharded, machine.optimizer(model.dense.parameters())


# ---- the sides ---------------------------------------------------------------------------------------------------------------
def dense_alone(workload: Workload, machine: Machine, batches: Sequence[Batch]) -> Steps:
    """The same dense compute, AllReduce and optimizer, with the rows already local and their gradient left where it is."""
    rows = torch.randn(workload.ids_per_rank, workload.dim, device=machine.device, requires_grad=True)
    return _alone(workload, machine, batches, lambda batch: rows)


def compute_alone(workload: Workload, machine: Machine, batches: Sequence[Batch]) -> Steps:
    """All compute of a rank and none of the exchange: as many ids, looked up in a table as large as the rank's own part."""
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

    def look_up(batch: Batch) -> Tensor:
        features = batch.to(machine.device, non_blocking=True).features
        return table(features.values() % rows, features.offsets().to(torch.int64))

    return _alone(workload, machine, batches, look_up)


def _alone(workload: Workload, machine: Machine, batches: Sequence[Batch], rows_of: Callable[[Batch], Tensor]) -> Steps:
    torch.manual_seed(1)
    model = DistributedDataParallel(  # as DistributedModelParallel sets it up for the sides
        machine.dense(workload.dim), gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=25
    )
    optimizer = machine.optimizer(model.parameters())

    def steps() -> Steps:
        for batch in batches:
            rows = rows_of(batch)
            optimizer.zero_grad()
            rows.grad = None
            loss = model(rows)
            loss.backward()
            optimizer.step()
            yield loss.detach()

    return steps()


def torchrec_pipeline(kind: Any, workload: Workload, machine: Machine, batches: Sequence[Batch]) -> Steps:
    """One of TorchRec's own training pipelines."""
    pipeline = kind(*build(workload, machine, machine.sharding_group()), machine.device)

    def steps() -> Steps:
        source = iter(batches)
        for _ in batches:
            yield pipeline.progress(source)

    return steps()


class Freescale:
    """The strategy's step by hand: its hooks in its order, without Lightning around them.

    Args:
        prioritize: with the schedule (``prioritize=True``) or without (``freescale_sync``).
        group: the ranks that share the table.
    """

    def __init__(self, prioritize: bool, workload: Workload, machine: Machine, group: dist.ProcessGroup):
        self._device = machine.device
        self._model, self._optimizer = build(workload, machine, group)
        self._copies = SideStream(machine.device)
        self.schedule: Schedule | None = None
        if prioritize:
            modules = {
                name: module
                for name, module in self._model.named_modules()
                if isinstance(module, ShardedEmbeddingCollection)
            }
            self.schedule = Schedule(
                modules, Groups(machine.exchange_group("high"), machine.exchange_group("low")), self._copies
            )
        self.prefetched: list[int] = []  # bytes of rows held for the next step, after each step
        self.collisions: list[float] = []  # share of those rows that had to wait for this step's gradients

    def steps(self, batches: Sequence[Batch]) -> Steps:
        source, ahead = iter(batches), deque[staging.Staged]()
        while True:
            for batch in source:
                ahead.append(self._stage(batch))
                if len(ahead) == 3:  # this step's batch and the two that the schedule works ahead on
                    break
            if not ahead:
                return
            yield self._step(ahead.popleft().use(), [staging.peek(staged) for staged in ahead])

    def _stage(self, batch: Batch) -> staging.Staged:
        return staging.copy_ahead(lambda: batch.to(self._device, non_blocking=True), self._copies)

    def _step(self, batch: Batch, ahead: list[Batch]) -> Tensor:
        schedule = self.schedule
        if schedule is not None:
            soon, later = ([part.features for part in ahead[k : k + 1]] for k in (0, 1))
            schedule.begin_step([batch.features], soon, later)
        loss, seen = self._model(batch)
        self._optimizer.zero_grad()
        if schedule is not None:
            schedule.before_backward()
        loss.backward()
        if schedule is not None:
            schedule.after_backward()
            self._watch(schedule)
        self._optimizer.step()
        return seen

    def _watch(self, schedule: Schedule) -> None:
        """Note what is held for the next step, now that all of its rows are on their way."""
        state = schedule.lanes[0].current
        received = {
            piece: [transfer.received for transfer in transfers]
            for piece, transfers in (state.incoming if state is not None else {}).items()
        }
        rows = {piece: sum(len(part) for part in parts) for piece, parts in received.items()}
        self.prefetched.append(sum(part.nbytes for parts in received.values() for part in parts))
        self.collisions.append(rows.get(COLLISION, 0) / max(1, sum(rows.values())))


def make_sides(workload: Workload, machine: Machine, batches: Sequence[Batch]) -> tuple[dict[str, Steps], Freescale]:
    """All sides by name, and the prioritized one again to ask it what it saw. A collective."""
    prioritized = Freescale(True, workload, machine, machine.exchange_group("low"))
    sides = {
        DENSE: dense_alone(workload, machine, batches),
        COMPUTE: compute_alone(workload, machine, batches),
        BASE: torchrec_pipeline(TrainPipelineBase, workload, machine, batches),
        SPARSE_DIST: torchrec_pipeline(TrainPipelineSparseDist, workload, machine, batches),
        SYNC: Freescale(False, workload, machine, machine.sharding_group()).steps(batches),
        PRIORITIZED: prioritized.steps(batches),
    }
    return sides, prioritized
