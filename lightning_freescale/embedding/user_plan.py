"""A sharding plan that the user brings, or that TorchRec's planner makes from the user's constraints and topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType

from lightning_freescale.embedding.plan import Collection, embedding_modules, table_configs
from lightning_freescale.embedding.zero_collision.collection import ZeroCollisionCollection
from lightning_freescale.runtime.errors import ConfigurationError

DATA_PARALLEL = ShardingType.DATA_PARALLEL.value


def check_plan_options(
    sharding: Any, plan: Any, constraints: Mapping[str, ParameterConstraints] | None, topology: Topology | None
) -> None:
    """Refuse options of the strategy that contradict each other.

    Raises:
        ConfigurationError: if more than one option says how the tables are sharded, or if ``plan`` is no ``ShardingPlan``.
    """
    planner = constraints is not None or topology is not None
    if plan is not None and not isinstance(plan, ShardingPlan):
        raise ConfigurationError(f"plan: expected a torchrec ShardingPlan, not {type(plan).__name__}")
    given = {"sharding": sharding is not None, "plan": plan is not None, "constraints or topology": planner}
    chosen = [name for name, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise ConfigurationError(f"{chosen[0]} and {chosen[1]} both say how the tables are sharded; use one of them")


def users_plan(
    module: nn.Module,
    sharders: Sequence[ModuleSharder],
    *,
    plan: ShardingPlan | None,
    constraints: Mapping[str, ParameterConstraints] | None,
    topology: Topology | None,
    device: torch.device,
    group: dist.ProcessGroup,
    local_size: int,
) -> ShardingPlan | None:
    """The plan for ``module``; None if the user has asked for none. All ranks must call it.

    Raises:
        ConfigurationError: on all ranks, if the plan does not fit the model, or if the planner finds none.
    """
    if plan is None and constraints is None and topology is None:
        return None
    collections = embedding_modules(module)
    for name, collection in collections.items():
        if isinstance(collection, ZeroCollisionCollection):
            raise ConfigurationError(
                f"plan, constraints, topology: {name} has zero-collision ids, whose rows are placed by bucket. Leave these "
                "options out"
            )
    if plan is None:
        tables = [config.name for collection in collections.values() for config in table_configs(collection)]
        if unknown := sorted(set(constraints or {}) - set(tables)):
            raise ConfigurationError(
                f"constraints: no table named {unknown[0]!r}; the tables are {', '.join(sorted(tables))}"
            )
        topology = topology or Topology(group.size(), device.type, local_world_size=local_size)
        plan = _planned(module, sharders, constraints, topology)
    _check(plan, collections, device)
    return plan


def _planned(
    module: nn.Module,
    sharders: Sequence[ModuleSharder],
    constraints: Mapping[str, ParameterConstraints] | None,
    topology: Topology,
) -> ShardingPlan:
    """The plan of TorchRec's planner on rank 0. All ranks get it, or the reason why there is none."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            planner = EmbeddingShardingPlanner(topology=topology, constraints=dict(constraints or {}), debug=False)
            answer = [planner.plan(module, list(sharders))]
        except Exception as error:  # the other ranks wait for an answer, whatever has happened here
            answer = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], str):
        raise ConfigurationError(f"constraints, topology: TorchRec's planner finds no plan. {answer[0]}")
    assert isinstance(answer[0], ShardingPlan)
    return answer[0]


def _check(plan: ShardingPlan, collections: Mapping[str, Collection], device: torch.device) -> None:
    for name, collection in collections.items():
        sequence = isinstance(collection, EmbeddingCollection)
        of_module = plan.plan.get(name)
        if of_module is None:
            planned = ", ".join(sorted(plan.plan)) or "nothing"
            raise ConfigurationError(f"plan: it has no entry for {name or 'the model itself'}; it has {planned}")
        for config in table_configs(collection):
            entry = of_module.get(config.name) if isinstance(of_module, dict) else None
            if entry is None:
                raise ConfigurationError(f"plan: the entry for {name} has no table {config.name!r}")
            if entry.sharding_type == DATA_PARALLEL and sequence and device.type == "cpu":
                raise ConfigurationError(
                    f"plan: table {config.name!r} of an EmbeddingCollection cannot be {DATA_PARALLEL} on a CPU, because "
                    "FBGEMM's kernel for it would pool the rows; choose another sharding"
                )
            if entry.sharding_type != DATA_PARALLEL and entry.compute_kernel == "dense":
                raise ConfigurationError(
                    f"plan: table {config.name!r} has the compute kernel 'dense'. The optimizer of sharded tables needs "
                    "'fused', 'fused_uvm' or 'fused_uvm_caching'"
                )
    if unknown := sorted(set(plan.plan) - set(collections)):
        raise ConfigurationError(
            f"plan: the model has no collection named {unknown[0]!r}; it has {', '.join(sorted(collections))}"
        )
