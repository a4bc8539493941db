"""What the prioritized exchange assumes about TorchRec and FBGEMM, checked on real sharded modules."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
)
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding import EmbeddingCollectionAwaitable, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding, RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist, TwPooledEmbeddingSharding
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.embedding.distinct_ids import add_cpu_kernel
from lightning_freescale.embedding.plan import is_of_a_table
from lightning_freescale.embedding.row_update import RowUpdate
from lightning_freescale.embedding.table_optimizer import kernels_in, kernels_of
from tests.embedding.contract_model_parallel import check_model_parallel
from tests.embedding.contract_training import check_training
from tests.embedding.test_id_exchange import check_ids
from tests.embedding.training import (
    BAG_DIMS,
    DIM,
    KEYS,
    ROWS,
    SHARDINGS,
    build,
    build_bags,
    make_schedule,
    random_batches,
    to_kjt,
)
from tests.ranks import run_ranks

# Private names of TorchRec and PyTorch that the package uses, and the classes that have them. check_names() checks each.
PINNED = {
    "_device": ShardedEmbeddingCollection,
    "_embedding_configs": ShardedEmbeddingCollection,
    "_embedding_dim": ShardedEmbeddingCollection,
    "_embedding_dim_for_sharding_type": ShardedEmbeddingCollection,
    "_embedding_names_per_sharding": ShardedEmbeddingCollection,
    "_env": ShardedEmbeddingCollection,
    "_features_order": ShardedEmbeddingCollection,
    "_features_to_permute_indices": ShardedEmbeddingCollection,
    "_lookups": ShardedEmbeddingCollection,
    "_need_indices": ShardedEmbeddingCollection,
    "_sharding_type_to_sharding": ShardedEmbeddingCollection,
    "_use_index_dedup": ShardedEmbeddingCollection,
    "_dmp_wrapped_module": DistributedModelParallel,
    "_in_backward_optimizers": nn.Parameter,
    "_managed_collision_modules": ShardedManagedCollisionCollection,
    "_sharding_tables": ShardedManagedCollisionCollection,
    "_output_dists": ShardedEmbeddingCollection,
    "_set_params_and_buffers_to_ignore_for_model": DistributedDataParallel,
    "_build_params_for_reducer": DistributedDataParallel,
    "_push_all_rebuilt_params": dist.Reducer,
    "_rebuild_buckets": dist.Reducer,
    "_dedup_indices": ShardedManagedCollisionCollection,
    "_optimizer_classes": nn.Parameter,
    "_optimizer_kwargs": nn.Parameter,
    "_callbacks": TwPooledEmbeddingDist,
    "_emb_dim_per_rank_per_feature": TwPooledEmbeddingSharding,
    "_embedding_bag_collection": FeatureProcessedEmbeddingBagCollection,
    "_embedding_bag_configs": ShardedEmbeddingBagCollection,
    "_embedding_dims": ShardedEmbeddingBagCollection,
    "_embedding_names": ShardedEmbeddingBagCollection,
    "_embedding_shardings": ShardedEmbeddingBagCollection,
    "_has_mean_pooling_callback": ShardedEmbeddingBagCollection,
    "_is_weighted": ShardedEmbeddingBagCollection,
    "_version": torch.Tensor,
    "_input_dists": ShardedEmbeddingCollection,
    "_has_feature_processor": RwSparseFeaturesDist,
    "_is_sequence": RwSparseFeaturesDist,
    "_keep_original_indices": RwSparseFeaturesDist,
    "_need_pos": RwSparseFeaturesDist,
    "_feature_block_sizes_tensor": RwSparseFeaturesDist,
    "_has_multiple_blocks_per_shard": RwSparseFeaturesDist,
    "_world_size": RwSparseFeaturesDist,
    "_module_fqn": KJTListSplitsAwaitable,
    "_wait_impl": KJTListSplitsAwaitable,
    "_jt_dict": KeyedJaggedTensor,
    "_backward_hooks": nn.Module,
    "_backward_pre_hooks": nn.Module,
    "_buffers": nn.Module,
    "_modules": nn.Module,
    "_original_tensor": TableBatchedEmbeddingSlice,
    "_wait_async": LazyAwaitable,
    "_parameters": nn.Module,
    "_schema": torch._ops.OpOverload,
    "_execution_engine": torch.autograd.Variable,
    "_C": torch,
    "_current_graph_task_id": torch._C,
}
# Options of the output that the module holds as ``_<name>``. Each release has some of them.
OUTPUT_OPTIONS = {"use_gather_select", "use_gather_select_per_sharding", "use_sorted_select"}
OUTPUT_ARGUMENTS = {  # what PrioritizedEmbedding.join passes
    "awaitables_per_sharding",
    "features_per_sharding",
    "embedding_names_per_sharding",
    "ctx",
    "need_indices",
    "features_to_permute_indices",
    "sharding_types",
}
OUTPUT_LEFT_OUT = {
    "module_fqn",
    "resize_awaitables",
}  # a name for error messages; an option to free storage early, which is off
KINDS = {"row_wise": {"row_wise"}, "table_wise": {"table_wise"}, "column_wise": {"column_wise"}}
KINDS["mixed"] = {"row_wise", "table_wise"}


def check_names(rank: int, world: int) -> None:
    """Assert that every private name exists and means what the package assumes."""
    dist.init_process_group("gloo")
    check_output_arguments()
    for kind in SHARDINGS:
        module = build(kind, "sgd", world)
        check_sharding(module, kind, world)
        check_ids_and_rows(module, rank, world)
        check_row_wise_ids(module, kind, world)
        check_row_updates(module)
        check_optimizer(module, rank)
        check_forward(module)
        check_weights(module)
    check_bags(rank, world)
    check_gradient_division()
    check_feature_processors()
    check_dedup_can_be_turned_off(world)
    check_model_parallel(world)
    check_ids(rank, world)
    check_backward_numbers()


def check_weights(module: ShardedEmbeddingCollection) -> None:
    """The weights of a table are a view of those of its kernel, which are a leaf; or an empty leaf."""
    kernels = {id(kernel.weights_host) for lookup in module._lookups for kernel in kernels_in(lookup)}
    for part in module.embeddings._modules.values():
        weight = part._parameters["weight"]
        if isinstance(weight, TableBatchedEmbeddingSlice):
            assert id(weight._original_tensor) in kernels
            assert weight._original_tensor.is_leaf
        else:
            assert not weight.numel()


def check_backward_numbers() -> None:
    """All parts of one backward have the same number, and another one than the backward before."""
    value = torch.ones(1, requires_grad=True)
    numbers: list[int] = []
    for _ in range(2):
        twice, thrice = value * 2, value * 3
        for product in (twice, thrice):
            product.grad_fn.register_prehook(lambda _: numbers.append(torch._C._current_graph_task_id()))
        (twice + thrice).backward()
    first, second = numbers[:2], numbers[2:]
    assert len(set(first)) == len(set(second)) == 1, "_current_graph_task_id"
    assert first[0] != second[0]


def check_row_wise_ids(module: ShardedEmbeddingCollection, kind: str, world: int) -> None:
    """The exchange of the ids of row-wise tables. ``test_owner_counts.py`` tests the numbers of ids that it sends."""
    exchanges = [part for part in module._input_dists if isinstance(part, RwSparseFeaturesDist)]
    assert len(exchanges) == (kind in ("row_wise", "mixed")), "_input_dists"
    if kind in ("row_wise", "column_wise"):  # column-wise features occur more than once
        assert bool(module._features_order) == (kind == "column_wise")
    for exchange in exchanges:
        rows = [ROWS["one"], *([ROWS["two"]] * 2 if kind == "row_wise" else [])]
        assert exchange._feature_block_sizes_tensor.tolist() == [-(-count // world) for count in rows]
        assert not exchange._has_multiple_blocks_per_shard
        assert exchange._world_size == world
        assert exchange._is_sequence
        assert not any((exchange._has_feature_processor, exchange._need_pos, exchange._keep_original_indices))
    kjt = to_kjt([[[1], [], [2]]])
    assert kjt._jt_dict is None
    by_key = kjt.to_dict()
    assert kjt._jt_dict is by_key is kjt.to_dict()


def check_bags(rank: int, world: int) -> None:
    """Widths of the features that each rank owns, the output's names and widths, and the order of column shards."""
    for kind in ("table_wise", "column_wise", "row_wise"):
        module = build_bags(kind, "sgd", world, weighted=kind == "table_wise")
        for name in (name for name, owner in PINNED.items() if owner is ShardedEmbeddingBagCollection):
            assert hasattr(module, name), name
        assert module._is_weighted == (kind == "table_wise")
        assert [config.name for config in module._embedding_bag_configs] == list(ROWS)
        sharding, order = module._embedding_shardings[0], None
        whole = sum(BAG_DIMS[table] for table in ("one", "two", "two"))
        assert isinstance(sharding, RwPooledEmbeddingSharding) == (kind == "row_wise")
        assert module._has_mean_pooling_callback is False
        if kind == "row_wise":
            assert sharding.embedding_dims() == [8, 24, 24]
        else:
            assert sum(map(sum, sharding._emb_dim_per_rank_per_feature())) == whole
            order = module._output_dists[0]._callbacks
        module(to_kjt([[[1], [2], [3]]], weighted=module._is_weighted))  # creates the exchange of ids
        assert dict(zip(module._embedding_names, module._embedding_dims, strict=True)) == {"a": 8, "b": 24, "c": 24}
        assert (order is None) == (kind != "column_wise")
        assert order is None or order[0](torch.zeros(1, whole)).shape == (1, whole)


def check_dedup_can_be_turned_off(world: int) -> None:
    """The module reads ``_use_index_dedup`` in every call."""
    add_cpu_kernel()
    module = build("row_wise", "sgd", world, use_index_dedup=True)
    kjt = to_kjt([[[1, 1, 1], [2], [2]]])
    requested = []
    for dedup in (True, False):
        assert hasattr(module, "_use_index_dedup")
        module._use_index_dedup = dedup
        context = module.create_context()
        module.input_dist(context, kjt).wait().wait()
        requested.append(sum(context.sharding_contexts[0].input_splits))
    assert requested == [2, 5]


def output_parameters() -> set[str]:
    # The signature of the class itself is that of its metaclass, __call__(*args, **kwargs).
    return set(inspect.signature(EmbeddingCollectionAwaitable.__init__).parameters) - {"self"}


def check_output_arguments() -> None:
    assert output_parameters() >= OUTPUT_ARGUMENTS
    unknown = output_parameters() - OUTPUT_ARGUMENTS - OUTPUT_LEFT_OUT - OUTPUT_OPTIONS
    assert not unknown, f"EmbeddingCollectionAwaitable has new arguments, does the output depend on them? {unknown}"


def check_sharding(module: ShardedEmbeddingCollection, kind: str, world: int) -> None:
    """There is one lookup for every sharding type, in the same order, with the rows that this rank owns."""
    types = list(module._sharding_type_to_sharding)
    assert set(types) == KINDS[kind]
    assert len(module._lookups) == len(types) == len(module._embedding_names_per_sharding)
    assert {name for names in module._embedding_names_per_sharding for name in names} == set(KEYS)
    assert torch.device(module._device or "cpu") == torch.device("cpu")
    assert module._embedding_dim == DIM
    assert module._env.process_group.size() == world
    assert module._need_indices is False
    assert isinstance(module._features_to_permute_indices, dict)
    for option in OUTPUT_OPTIONS & output_parameters():
        assert hasattr(module, f"_{option}"), option
    held = torch.zeros(len(ROWS), dtype=torch.int64)
    for sharding_type, lookup in zip(types, module._lookups, strict=True):
        width = DIM // min(world, 2) if sharding_type == "column_wise" else DIM
        assert module._embedding_dim_for_sharding_type(sharding_type) == width
        for table in tables_of(lookup):
            assert table.feature_names == {"one": ["a"], "two": ["b", "c"]}[table.name]
            held[list(ROWS).index(table.name)] += table.local_rows * (table.local_cols or DIM)
    dist.all_reduce(held)
    assert held.tolist() == [rows * DIM for rows in ROWS.values()]


def tables_of(lookup: Any) -> list[Any]:
    return [table for config in lookup.grouped_configs for table in config.embedding_tables]


def check_ids_and_rows(module: ShardedEmbeddingCollection, rank: int, world: int) -> None:
    """Ids arrive by feature in the order of the tables, and by rank as the context says. Lookups return rows in this order."""
    asked = random_batches(rank, 1, 3, lambda rank, step: 3 + 2 * rank)[0]
    kjt = to_kjt(asked)
    context = module.create_context()
    received = module.input_dist(context, kjt).wait().wait()
    assert len(received) == len(module._lookups) == len(context.sharding_contexts)
    shards = local_weights(module)
    for lookup, features, inner, sharding_type in zip(
        module._lookups, received, context.sharding_contexts, module._sharding_type_to_sharding, strict=True
    ):
        held = tables_of(lookup)
        assert features.keys() == [name for table in held for name in table.feature_names]
        assert sum(inner.output_splits) == features.values().numel()
        before = inner.features_before_input_dist
        assert sum(inner.input_splits) == before.values().numel()
        assert len(inner.input_splits) == len(inner.output_splits) == world
        assert list(inner.batch_size_per_rank) == [3 + 2 * peer for peer in range(world)]
        assert features.stride() == sum(inner.batch_size_per_rank)
        permute = inner.unbucketize_permute_tensor
        if sharding_type == "row_wise":
            assert permute.sort().values.tolist() == list(range(sum(inner.input_splits)))
        else:
            assert permute is None
        if not features.values().numel():
            continue
        width = module._embedding_dim_for_sharding_type(sharding_type)
        expected = torch.cat(
            [shards[table.name][features[name].values()] for table in held for name in table.feature_names]
        )
        with torch.no_grad():
            assert torch.equal(lookup(features).view(-1, width), expected)
    assert kernels_of(module) or not any(map(tables_of, module._lookups))
    for kernel in kernels_of(module):  # their step counts can be set (Adam needs that, and exists on CUDA only)
        for counter in (kernel.iter_cpu, kernel.iter):
            assert counter.shape == (1,)
            assert counter.dtype == torch.int64
        kernel.iter_cpu.fill_(5)
        assert int(kernel.iter_cpu) == 5


def local_weights(module: ShardedEmbeddingCollection) -> dict[str, Tensor]:
    """This rank's part of each table, for the tables of which it holds a part."""
    found = {name: module.state_dict()[f"embeddings.{name}.weight"].local_shards() for name in ROWS}
    return {name: shards[0].tensor.clone() for name, shards in found.items() if shards}


def check_row_updates(module: ShardedEmbeddingCollection) -> None:
    """Kernels keep tensors and hooks where ``row_update.py`` looks for them, and it can update without a look-up."""
    for kernel in kernels_of(module):
        held = [*kernel._buffers.values(), *kernel._parameters.values()]
        assert any(tensor is kernel.weights_host for tensor in held)
        assert not kernel._backward_hooks
        hook = kernel.register_full_backward_pre_hook(lambda *_: None)
        assert len(kernel._backward_pre_hooks) == 1
        hook.remove()
        update = RowUpdate(kernel)
        offsets = torch.tensor([0] + [1] * len(kernel.feature_table_map))
        update(torch.tensor([0]), offsets, torch.zeros(1, kernel.max_D), step=1)
        assert update.repeats


def check_optimizer(module: ShardedEmbeddingCollection, rank: int) -> None:
    """step() passes the learning rate to the kernels and changes no weight. The backward of a lookup uses this rate."""
    optimizer = module.fused_optimizer
    for rate, expected in ((0.0, False), (0.1, True)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        before = local_weights(module)
        optimizer.step()
        assert all(torch.equal(before[name], weight) for name, weight in local_weights(module).items())
        output = module(to_kjt([[[1], [2], [3]]]))
        sum(output[key].values().sum() for key in KEYS).backward()
        after = local_weights(module)
        changed = torch.tensor(any(not torch.equal(before[name], after[name]) for name in after), dtype=torch.int32)
        dist.all_reduce(changed)
        assert bool(changed) == expected, f"learning rate {rate}"


def check_forward(module: ShardedEmbeddingCollection) -> None:
    """A ``forward`` of the instance replaces that of the class, which can still be called."""
    assert callable(type(module).forward)
    seen: list[Any] = []
    module.forward = seen.append
    module("features")
    assert seen == ["features"]
    del module.__dict__["forward"]
    assert module.forward.__func__ is type(module).forward


def check_gradient_division() -> None:
    assert get_gradient_division() is True
    set_gradient_division(False)
    assert get_gradient_division() is False
    set_gradient_division(True)


def check_feature_processors() -> None:
    """The tables of a collection with feature processors are in a collection of their own. The names of the rest begin alike."""
    config = EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=64, feature_names=["a"])
    bags = EmbeddingBagCollection(tables=[config], is_weighted=True)
    processed = FeatureProcessedEmbeddingBagCollection(bags, PositionWeightedModuleCollection({"a": 4}))
    assert processed._embedding_bag_collection is bags
    tables = [key for key in processed.state_dict() if is_of_a_table(key)]
    assert tables == ["_embedding_bag_collection.embedding_bags.t.weight"]
    assert len(processed.state_dict()) == 2


def output_options(rank: int) -> set[str]:
    """The options that the prioritized exchange passes to the module's output."""
    dist.init_process_group("gloo")
    exchange = make_schedule(build("row_wise", "sgd", 2)).modules[0].exchange
    return set(exchange.output_options)


def check(world: int = 2) -> None:
    """Run both checks, each on its own set of ranks."""
    run_ranks(check_names, world, (world,))
    results = run_ranks(check_training, world, (world,))
    for kind in (*SHARDINGS, "our own kernel", "zero-collision ids"):
        assert all(result[kind] for result in results), f"{kind}: prioritized and synchronous training differ"
    assert not all(result["every row prefetched"] for result in results), "the comparison does not detect stale rows"
