"""Trains zero-collision tables in a plain loop in three ways: plain TorchRec fed by the reference, synchronous, prioritized."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

import lightning_freescale as fs
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding import table_optimizer
from lightning_freescale.embedding.all_to_all import ExchangeGroups
from lightning_freescale.embedding.schedule import ExchangeSchedule
from lightning_freescale.embedding.shard import shard
from lightning_freescale.embedding.zero_collision.collection import ZeroCollisionCollection
from lightning_freescale.embedding.zero_collision.module import ZeroCollisionModule
from lightning_freescale.embedding.zero_collision.reference import ReferenceRemapper

KEYS = ["clicks", "negatives", "shops"]
DIM = 8
TABLES = {"item": (60, ["clicks", "negatives"]), "shop": (40, ["shops"])}
EVICTING = {
    "item": fs.ZeroCollision(buckets=6, max_probe=3, evict="ttl", ttl=1, insert=["clicks"], reserved=2),
    "shop": fs.ZeroCollision(buckets=5, max_probe=3, evict="lru", ttl=2),
}

STEPS = 10
SLEEP_CYCLES = 40_000_000  # of a GPU: 20 ms, several times as long as the host needs for a step

host_group: Any = None  # process group for CPU tensors; by default that of all ranks

# The batches of one rank: for every step and sample, the ids of each feature.
Batches = list[list[list[list[int]]]]


def drifting_batches(rank: int, steps: int, seed: int, samples: Callable[[int, int], int], scale: int = 1) -> Batches:
    """Ids of a window that moves with the steps: old ids die, new ones appear. Negatives are drawn from all ids so far.

    Args:
        scale: how many times more ids a step has, and the window.
    """
    chance = random.Random(1000 * seed + rank)

    def ids(step: int, negative: bool) -> list[int]:
        first = 0 if negative else max(0, 2 * step - 8)
        window = scale * first, scale * (2 * step + 30)
        return [chance.randrange(*window) * 7919 + 3 for _ in range(chance.randrange(4 * scale + 1))]

    return [
        [[ids(step, key == "negatives") for key in KEYS] for _ in range(samples(rank, step))] for step in range(steps)
    ]


def to_kjt(batch: list[list[list[int]]], device: str = "cpu") -> KeyedJaggedTensor:
    batch = batch or [[[] for _ in KEYS]]  # TorchRec does not accept an empty batch: use one sample without ids
    by_feature = [[sample[f] for sample in batch] for f in range(len(KEYS))]
    values = torch.tensor([i for feature in by_feature for ids in feature for i in ids], dtype=torch.int64)
    lengths = torch.tensor([len(ids) for feature in by_feature for ids in feature], dtype=torch.int64)
    return KeyedJaggedTensor(KEYS, values, lengths=lengths, stride=len(batch)).to(torch.device(device))


class Holder(nn.Module):
    """The collection as a member, as in a user's model."""

    def __init__(self, collection: nn.Module):
        super().__init__()
        self.embedding: Any = collection


def plain_collection() -> EmbeddingCollection:
    torch.manual_seed(3)
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=features)
            for name, (rows, features) in TABLES.items()
        ]
    )


class Trained:
    """One model in training, in one of three modes: ``"reference"``, ``"synchronous"`` or ``"prioritized"``."""

    def __init__(
        self,
        mode: str,
        optimizer: str,
        world: int,
        options: dict[str, fs.ZeroCollision] = EVICTING,
        device: str = "cpu",
        backend: str | None = None,
        dedup: Any = False,
    ):
        self.device = device
        collection: nn.Module = plain_collection()
        managed = fs.zero_collision(plain_collection(), options)
        if mode != "reference":
            collection = managed
        self.holder, self.mode = Holder(collection), mode
        group = host_group if device == "cpu" and host_group else dist.group.WORLD
        assert group is not None
        settings = {"optimizer": optimizer, "lr": 0.1}
        sharding = "row_wise"
        self.sharded = shard(
            self.holder,
            group,
            torch.device(device),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
            optimizer=settings,
            sharding=sharding,
            dedup=dedup,
        )
        self.module = self.holder.embedding
        self.remappers = _reference_remappers(managed)
        self.draws = {table: _identities(managed, table).draw for table in TABLES}
        self.step = 0
        self.timeline: Timeline = getattr(self.module, "timeline", Timeline())
        self.schedule: ExchangeSchedule | None = None
        if mode == "prioritized":
            groups = ExchangeGroups(dist.new_group(backend=backend), dist.new_group(backend=backend))
            self.schedule = ExchangeSchedule({"embedding": self.module}, groups)
        torch.manual_seed(5)
        self.head = nn.Linear(DIM, 1).to(device)

    # ---- a step -----------------------------------------------------------------------------------------------------
    def train_step(
        self, rank: int, batches: list[Batches], step: int, kjts: list[KeyedJaggedTensor], disturbance: str = ""
    ) -> Tensor:
        """One step, and its loss. The host does not wait for it. ``disturbance``: something unusual happens in some steps."""
        kjt = kjts[step]
        after_next = kjts[step + 2 : step + 3]
        if disturbance == "wrong prefetch" and after_next:
            after_next = [to_kjt(batches[rank][0], self.device)]
        if disturbance == "switches" and self.schedule is not None:
            self.schedule.activate(["embedding"] if step % 5 < 3 else [])
        self.timeline.begin_step(step)
        if self.mode == "reference":
            kjt = self._remapped(rank, [of_rank[step] for of_rank in batches])
        if self.schedule is not None:
            self.schedule.begin_step([kjt], kjts[step + 1 : step + 2], after_next)
        if disturbance == "no forward" and step % 4 == 2:
            self.timeline.end_step()
            return torch.zeros(())
        looked_up = self.evaluate(kjts[(step + 1) % STEPS]) if disturbance == "look-ups" else torch.zeros(())
        loss = self._loss(self.module(kjt))
        if disturbance == "look-ups":
            looked_up += self.evaluate(kjts[(step + 2) % STEPS])
        if disturbance == "no backward" and step % 4 == 2:
            self.timeline.end_step()
            return loss.detach()
        if self.schedule is not None:
            self.schedule.before_backward()
        if self.device == "cuda":  # keeps the device behind the host, which shows whether a stream fails to wait
            torch.cuda._sleep(SLEEP_CYCLES)
        loss.backward()
        if self.schedule is not None:
            self.schedule.after_backward()
        self.step += 1
        self.timeline.end_step()
        return loss.detach() + looked_up

    def evaluate(self, kjt: KeyedJaggedTensor) -> Tensor:
        """A look-up without gradients, as in validation. FBGEMM counts it as a step; the strategy takes that back, too."""
        assert self.mode != "reference"
        counted = table_optimizer.steps(self.holder)
        with torch.no_grad():
            loss = self._loss(self.module(kjt))
        table_optimizer.set_steps(self.holder, counted)
        return loss

    def _loss(self, output: Any) -> Tensor:
        parts = (self.head(torch.tanh(output[key].values())).sum() + output[key].lengths().sum() for key in KEYS)
        return sum(parts, torch.zeros((), device=self.device))

    # ---- the reference ----------------------------------------------------------------------------------------------
    def _remapped(self, rank: int, batch: list[list[list[list[int]]]]) -> KeyedJaggedTensor:
        """The batch of this rank with slots for ids, after the ids of all ranks were inserted and their rows drawn."""
        for table, inserting in (("item", "clicks"), ("shop", "shops")):
            at = KEYS.index(inserting)
            ids = [number for of_rank in batch for sample in of_rank for number in sample[at]]
            fresh = self.remappers[table].insert(ids, self.step)
            slots, owners = (torch.tensor(list(part), dtype=torch.int64) for part in (fresh.keys(), fresh.values()))
            self._write(f"embedding.embeddings.{table}.weight", slots, self.draws[table](owners))
        tables = {"clicks": "item", "negatives": "item", "shops": "shop"}
        return to_kjt(
            [
                [self.remappers[tables[key]].look_up(ids) for key, ids in zip(KEYS, sample, strict=True)]
                for sample in batch[rank]
            ]
        )

    @torch.no_grad()
    def _write(self, table: str, slots: Tensor, rows: Tensor) -> None:
        """Write rows of a plain table, and set their optimizer state to 0."""
        state = self.sharded.fused_optimizer.state_dict()["state"].get(table, {})
        zeros = [(value, torch.zeros_like(rows)) for value in state.values() if hasattr(value, "local_shards")]
        for value, new in [(self.holder.state_dict()[table], rows), *zeros]:
            for part in value.local_shards():
                first, size = part.metadata.shard_offsets[0], part.metadata.shard_sizes[0]
                mine = (slots >= first) & (slots < first + size)
                part.tensor[slots[mine] - first] = new[mine] if part.tensor.ndim == 2 else 0.0

    # ---- results ----------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Tensor]:
        """Weights, optimizer state, identities and ages of all ranks, under the same names in all modes. A collective."""
        sharded = {key: value for key, value in self.holder.state_dict().items() if hasattr(value, "local_shards")}
        for table, entry in self.sharded.fused_optimizer.state_dict()["state"].items():
            sharded |= {f"{table}.{key}": value for key, value in entry.items() if hasattr(value, "local_shards")}
        found = {_common_name(key): _full(value) for key, value in sharded.items()}
        if self.mode == "reference":
            for table, remapper in self.remappers.items():
                for name, values in (("identities", remapper.identities), ("metadata", remapper.seen)):
                    full = torch.full((TABLES[table][0], 1), -1, dtype=torch.float64)
                    for slot, value in values.items():
                        full[slot] = value
                    found[f"{table}._hash_zch_{name}"] = full
        return found

    def counts(self) -> Tensor:
        """Ids that were inserted, rows that were taken for them, and ids without a row, on all ranks. A collective."""
        steps = self.timeline.take()
        names = ("ids_inserted", "ids_evicted", "ids_fallback")
        total = torch.tensor([sum(step.counts.get(name, 0) for step in steps) for name in names])
        dist.all_reduce(total, group=host_group)
        return total


def _identities(collection: ZeroCollisionCollection, table: str) -> ZeroCollisionModule:
    module = collection._managed_collision_collection._managed_collision_modules[table]
    assert isinstance(module, ZeroCollisionModule)
    return module


def _reference_remappers(collection: ZeroCollisionCollection) -> dict[str, ReferenceRemapper]:
    modules = {table: _identities(collection, table) for table in TABLES}
    return {table: ReferenceRemapper(module.layout, module.eviction) for table, module in modules.items()}


def _common_name(key: str) -> str:
    for part in ("_embedding_module.", "_managed_collision_collection._managed_collision_modules.", "embedding."):
        key = key.replace(part, "")
    return key


def _full(value: Any) -> Tensor:
    """A sharded tensor, put together on every rank, as float64: all values here are smaller than 2^53."""
    full = torch.zeros(value.metadata().size, dtype=torch.float64)
    for part in value.local_shards():
        place = tuple(
            slice(first, first + size)
            for first, size in zip(part.metadata.shard_offsets, part.metadata.shard_sizes, strict=True)
        )
        full[place] = part.tensor.cpu().to(torch.float64)
    dist.all_reduce(full, group=host_group)
    return full


def same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def compare_modes(
    rank: int,
    world: int,
    optimizer: str,
    modes: tuple[str, ...] = ("reference", "synchronous", "prioritized"),
    seed: int = 0,
    samples: Any = None,
    look_at: str = "every step",
    validate: bool = False,
    disturbance: str = "",
    sabotage: Any = None,
    options: dict[str, fs.ZeroCollision] = EVICTING,
    any_counts: bool = False,
    dedup: Any = False,
) -> tuple[bool, bool]:
    """Train in all ``modes``: whether all losses agree with those of the first mode, and whether all states do.

    Args:
        samples: ``samples(rank, step)`` samples in each step.
        look_at: the steps after which states are compared: ``"every step"``, ``"some steps"`` or ``"the end"``.
        validate: look ids up without gradients after these steps.
        disturbance: something unusual that happens in some steps, see :meth:`Trained.train_step`.
        sabotage: changes the schedule of the prioritized mode.
        any_counts: do not demand that ids are evicted and find no row.
        dedup: the option of the strategy.
    """
    samples = samples or (lambda rank, step: 12 // world)
    batches = [drifting_batches(peer, STEPS, seed, samples) for peer in range(world)]
    results = []
    for mode in modes:
        trained = Trained(mode, optimizer, world, options, dedup=dedup)
        if sabotage is not None and trained.schedule is not None:
            sabotage(trained.schedule)
        kjts = [to_kjt(batch) for batch in batches[rank]]
        losses, states = [], []
        for step in range(STEPS):
            losses.append(trained.train_step(rank, batches, step, kjts, disturbance))
            if look_at == "every step" or step == STEPS - 1 or (look_at == "some steps" and step % 5 == 3):
                if trained.schedule is not None:
                    trained.schedule.flush()
                if validate:  # with ids that are not known, and some that are
                    losses.append(trained.evaluate(to_kjt(batches[rank][(step * 7) % STEPS])))
                states.append(trained.state())
        if trained.schedule is not None:
            scheduled = trained.schedule.modules[0]
            assert scheduled.synchronous_reason is None, scheduled.synchronous_reason
            assert scheduled.kjt_index == 0 or disturbance == "switches"
            assert (scheduled.exchange.stats.bytes_saved > 0) == bool(dedup)
        if mode != "reference":
            counts = trained.counts()
            assert (counts > 0).all() or any_counts, counts  # otherwise the comparison shows little
        results.append(([loss.item() for loss in losses], states))
    first = results[0]
    return (
        all(other[0] == first[0] for other in results[1:]),
        all(same_state(a, b) for other in results[1:] for a, b in zip(first[1], other[1], strict=True)),
    )
