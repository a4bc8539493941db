"""``zero_collision`` refuses what cannot work, and names the table, the option and the value."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection

import lightning_freescale as fs
from lightning_freescale.batch.checks import check_batch
from lightning_freescale.embedding.plan import embedding_modules, make_plan, make_sharders, rows_by_feature
from lightning_freescale.embedding.shard import shard
from tests.embedding.zero_collision.training import EVICTING, Holder, plain_collection
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def items(rows: int = 64) -> EmbeddingCollection:
    table = EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=rows, feature_names=["clicks", "negatives"])
    return EmbeddingCollection(tables=[table])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": 0}, "table 'item', buckets=0: must be at least 1"),
        ({"buckets": 7}, "table 'item', buckets=7: does not divide its 64 rows; 63 rows would fit"),
        ({"buckets": 64}, "buckets=64: leaves 1 slot in a bucket"),
        ({"buckets": 8, "reserved": 8}, "reserved=8: must be between 1 and 7"),
        ({"buckets": 8, "max_probe": 0}, "max_probe=0: must be at least 1"),
        ({"buckets": 8, "evict": "lfu"}, "evict='lfu': is unknown"),
        ({"buckets": 8, "evict": "ttl"}, "ttl=None: evict='ttl' needs a time to live"),
        ({"buckets": 8, "evict": "ttl", "ttl": 0}, "ttl=0: must be at least 1"),
        ({"buckets": 8, "ttl": 5}, "ttl=5: has no effect without evict"),
        ({"buckets": 8, "insert": ["likes"]}, "'likes' is no feature of the table; they are clicks, negatives"),
        ({"buckets": 8, "insert": []}, "names no feature"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.ConfigurationError, match=re.escape(message)):
        fs.zero_collision(items(), {"item": fs.ZeroCollision(**options)})


def test_every_table_has_an_entry() -> None:
    with pytest.raises(fs.ConfigurationError, match="no table named 'shop'; the tables are item"):
        fs.zero_collision(items(), {"shop": fs.ZeroCollision(buckets=8)})
    with pytest.raises(fs.ConfigurationError, match="table 'shop' of the collection has no entry"):
        fs.zero_collision(plain_collection(), {"item": EVICTING["item"]})


@pytest.mark.parametrize(
    ("world", "sharding", "message"),
    [
        (2, "column_wise", "sharding: 'column_wise' for table 'item'.*use 'row_wise'"),
        (2, {"shop": "table_wise"}, "sharding: 'table_wise' for table 'shop'.*use 'row_wise'"),
        (8, None, "table 'item', buckets=6: fewer than the 8 ranks"),
    ],
)
def test_shardings_that_do_not_fit(world: int, sharding: Any, message: str) -> None:
    model = Holder(fs.zero_collision(plain_collection(), EVICTING))
    sharders = make_sharders(model, None, CPU)
    with pytest.raises(fs.ConfigurationError, match=message):
        make_plan(model, sharders, sharding, device=CPU, world_size=world, local_size=world)


def test_torchrecs_own_collision_modules_are_refused() -> None:
    managed = fs.zero_collision(plain_collection(), EVICTING)
    theirs = ManagedCollisionEmbeddingCollection(managed._embedding_module, managed._managed_collision_collection)
    with pytest.raises(fs.ConfigurationError, match=r"embedding is a ManagedCollision.*zero_collision"):
        embedding_modules(Holder(theirs))
    assert list(embedding_modules(Holder(managed))) == ["embedding"]


def test_batches_with_negative_ids_are_refused() -> None:
    rows = rows_by_feature(Holder(fs.zero_collision(items(), {"item": fs.ZeroCollision(buckets=8)})))
    lengths = torch.tensor([2, 0])
    check_batch(KeyedJaggedTensor(["clicks", "negatives"], torch.tensor([0, 2**63 - 1]), lengths=lengths), rows)
    with pytest.raises(fs.InputError, match="clicks: id -3 is negative; zero-collision ids"):
        check_batch(KeyedJaggedTensor(["clicks", "negatives"], torch.tensor([7, -3]), lengths=lengths), rows)


def test_without_a_strategy_ids_are_only_looked_up() -> None:
    collection = fs.zero_collision(items(), {"item": fs.ZeroCollision(buckets=8)})
    features = KeyedJaggedTensor(["clicks", "negatives"], torch.tensor([5, 123]), lengths=torch.tensor([1, 1]))
    with pytest.raises(fs.ConfigurationError, match="only the strategies 'freescale' and 'freescale_sync' train"):
        collection(features)
    rows = collection.eval()(features)["clicks"].values()
    table = collection.state_dict()["_embedding_module.embeddings.item.weight"]
    assert torch.equal(rows[0], table[5 * 8 + 7])  # the reserved slot of bucket 5 % 8, which has 8 slots
    assert (collection.state_dict()[IDENTITIES] == -1).all()


IDENTITIES = "_managed_collision_collection._managed_collision_modules.item._hash_zch_identities"


def test_identities_that_were_loaded_are_sharded() -> None:
    run_ranks(_shard_a_loaded_state, 2)


def _shard_a_loaded_state(rank: int) -> None:
    dist.init_process_group("gloo")
    model = Holder(fs.zero_collision(items(), {"item": fs.ZeroCollision(buckets=8)}))
    state = model.state_dict()
    state[f"embedding.{IDENTITIES}"] = torch.arange(64).view(64, 1)
    model.load_state_dict(state)
    group = dist.group.WORLD
    assert group is not None
    shard(model, group, CPU, local_size=2)
    (part,) = model.state_dict()[f"embedding.{IDENTITIES}"].local_shards()
    assert part.tensor.flatten().tolist() == list(range(32 * rank, 32 * rank + 32))


def test_another_number_of_buckets_is_named() -> None:
    saved = fs.zero_collision(items(), {"item": fs.ZeroCollision(buckets=4)}).state_dict()
    other = fs.zero_collision(items(), {"item": fs.ZeroCollision(buckets=8)})
    with pytest.raises(fs.CheckpointError, match=r"table 'item' has buckets=8, but .*buckets=4"):
        other.load_state_dict(saved)
