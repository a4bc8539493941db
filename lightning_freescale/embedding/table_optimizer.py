"""The fused optimizer of the tables: its options, its state, its step counts and its learning rate.

FBGEMM's kernels update the rows inside the backward of their lookup. There is no separate optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from lightning_freescale.runtime.errors import ConfigurationError

# The update of a row depends only on the gradient and the state of that row. So an update of half of a batch's rows, or a later
# update, gives the same result.
TABLE_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
    "partial_rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    "lamb": EmbOptimType.LAMB,
    "partial_rowwise_lamb": EmbOptimType.PARTIAL_ROWWISE_LAMB,
}
# They keep two moments of the gradient, so they change rows whose gradient is zero. FBGEMM has them on CUDA only; on a CPU the
# update is our own (``moment_kernel.py``).
MOMENT_OPTIMIZERS = ("adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb")
# How many numbers of state the optimizer keeps for a row of ``D`` numbers.
STATE_OF_A_ROW = {
    "sgd": "0",
    "adagrad": "`D`",
    "rowwise_adagrad": "1",
    "adam": "`2 D`",
    "partial_rowwise_adam": "`D + 1`",
    "lamb": "`2 D`",
    "partial_rowwise_lamb": "`D + 1`",
}
DEFAULT_TABLE_OPTIMIZER: Mapping[str, Any] = {"optimizer": "rowwise_adagrad", "lr": 0.02}
# How FBGEMM's row-wise Adagrad decays the weights of the rows that it updates. It ignores the weight decay of SGD and Adagrad.
DECAY_MODES = {"l2": WeightDecayMode.L2, "decoupled": WeightDecayMode.DECOUPLE}
DECAY_MODE_OPTIMIZER = "rowwise_adagrad"
_FBGEMM_NAMES = {"lr": "learning_rate", "eps": "eps", "weight_decay": "weight_decay", "max_gradient": "max_gradient"}


# ---- options -------------------------------------------------------------------------------------------------------
def fused_params(options: Mapping[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """FBGEMM's arguments for ``options`` such as ``{"optimizer": "rowwise_adagrad", "lr": 0.02, "eps": 1e-8}``.

    Raises:
        ConfigurationError: if the optimizer is unknown, or if an option is unknown or invalid.
    """
    options = dict(DEFAULT_TABLE_OPTIMIZER if options is None else options)
    name = options.pop("optimizer", DEFAULT_TABLE_OPTIMIZER["optimizer"])
    if name not in TABLE_OPTIMIZERS:
        raise ConfigurationError(
            f"embedding_optimizer: optimizer {name!r} is not supported; choose one of {', '.join(TABLE_OPTIMIZERS)} "
            "(their update of a row depends on that row alone, which keeps sharded and overlapped training exact)"
        )
    params: dict[str, Any] = {
        "optimizer": TABLE_OPTIMIZERS[name],
        "learning_rate": DEFAULT_TABLE_OPTIMIZER["lr"],
    }
    further = {"betas": name in MOMENT_OPTIMIZERS, "weight_decay_mode": name == DECAY_MODE_OPTIMIZER}
    known = [*_FBGEMM_NAMES, *(key for key, exists in further.items() if exists)]
    for key, value in options.items():
        if key not in known:
            raise ConfigurationError(
                f"embedding_optimizer: {key}={value!r} is unknown for {name!r}; known: {', '.join(known)}"
            )
        if key == "betas":
            params["beta1"], params["beta2"] = value
        elif key == "weight_decay_mode":
            params[key] = _decay_mode(value)
        else:
            params[_FBGEMM_NAMES[key]] = value
    _check_values(name, params)
    if "max_gradient" in params:
        params["gradient_clipping"] = True
    return params


def _check_values(name: str, params: Mapping[str, Any]) -> None:
    if params["learning_rate"] < 0:
        raise ConfigurationError(f"embedding_optimizer: lr={params['learning_rate']} must not be negative")
    _check_decay(f"embedding_optimizer: weight_decay={params.get('weight_decay')}", name, params)
    if params.get("max_gradient", 1.0) <= 0:
        raise ConfigurationError(f"embedding_optimizer: max_gradient={params['max_gradient']} must be positive")


def _decay_mode(value: Any) -> WeightDecayMode:
    if value not in DECAY_MODES:
        raise ConfigurationError(
            f"embedding_optimizer: weight_decay_mode={value!r} is unknown; choose one of {', '.join(DECAY_MODES)}"
        )
    return DECAY_MODES[value]


def _check_decay(subject: str, name: str, params: Mapping[str, Any]) -> None:
    """Refuse a weight decay that FBGEMM would ignore."""
    if not params.get("weight_decay") or name in MOMENT_OPTIMIZERS or params.get("weight_decay_mode") is not None:
        return
    advice = (
        f"Set weight_decay_mode to one of {', '.join(DECAY_MODES)}"
        if name == DECAY_MODE_OPTIMIZER
        else f"Leave it out, or use {DECAY_MODE_OPTIMIZER} with a weight_decay_mode, or {', '.join(MOMENT_OPTIMIZERS)}"
    )
    raise ConfigurationError(f"{subject}: FBGEMM ignores the weight decay of {name!r}. {advice}")


def has_own_optimizer(collections: Iterable[nn.Module]) -> bool:
    """Whether the user has attached optimizers to tables, with TorchRec's ``apply_optimizer_in_backward``."""
    return any(
        hasattr(parameter, "_optimizer_classes") for collection in collections for parameter in collection.parameters()
    )


def check_own_optimizers(collections: Iterable[nn.Module], device: torch.device) -> None:
    """Refuse optimizers that ``apply_optimizer_in_backward`` has attached to tables and that cannot train on ``device``.

    Raises:
        ConfigurationError: it names the table and the optimizer, or a weight decay that FBGEMM would ignore.
    """
    known = {kind: name for name, kind in TABLE_OPTIMIZERS.items()}
    for collection in collections:
        for table, parameter in collection.named_parameters():
            options: Sequence[Mapping[str, Any]] = getattr(parameter, "_optimizer_kwargs", ({},))
            for number, optimizer in enumerate(getattr(parameter, "_optimizer_classes", ())):
                name = known.get(optimizer_type_to_emb_opt_type(optimizer))
                if name is None:
                    raise ConfigurationError(
                        f"apply_optimizer_in_backward: {optimizer.__name__} of {table} is not supported on {device.type}; use "
                        f"the optimizer of torch or TorchRec for one of {', '.join(known.values())}"
                    )
                subject = f"apply_optimizer_in_backward: weight_decay of {optimizer.__name__} of {table}"
                _check_decay(subject, name, options[number])


# ---- state, for checkpoints ----------------------------------------------------------------------------------------
def optimizer_tensors(sharded: DistributedModelParallel | None) -> dict[str, Any]:
    """Optimizer state of each row, by name, as sharded tensors that share memory with the kernels.

    It has entries only for tables of which this rank holds a part. With table-wise sharding there may be none.

    Args:
        sharded: the sharded model; ``None`` if it has no tables.
    """
    if sharded is None:
        return {}
    return {
        f"{table}.{name}": value
        for table, entry in sharded.fused_optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if hasattr(value, "local_shards")
    }


def reset_state(sharded: DistributedModelParallel) -> None:
    """Set the optimizer of the tables back to its beginning: no accumulated gradients, no moments, no steps. Weights stay."""
    for value in optimizer_tensors(sharded).values():
        for part in value.local_shards():
            part.tensor.zero_()
    set_count((kernel for _, kernel in kernels_by_collection(sharded)), 0)


# ---- step counts ---------------------------------------------------------------------------------------------------
def kernels_of(module: nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """FBGEMM's kernels of one sharded collection on this rank."""
    return [kernel for lookup in getattr(module, "_lookups", ()) for kernel in kernels_in(lookup)]


def kernels_in(lookup: nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """FBGEMM's kernels of one lookup of a sharded collection: one kernel for each group of tables."""
    return [child for child in lookup.modules() if isinstance(child, SplitTableBatchedEmbeddingBagsCodegen)]


def kernels_by_collection(module: nn.Module) -> Iterator[tuple[str, SplitTableBatchedEmbeddingBagsCodegen]]:
    """All kernels on this rank, each with the qualified name of its collection."""
    for name, child in module.named_modules():
        if isinstance(child, ShardedModule):
            yield from ((name, kernel) for kernel in kernels_of(child))


def updates_in_backward_only(kernels: Iterable[tuple[str, SplitTableBatchedEmbeddingBagsCodegen]]) -> bool:
    """Whether a look-up changes no table. It does if a cache writes rows back to a table in host memory."""
    places = (EmbeddingLocation.DEVICE, EmbeddingLocation.HOST)
    return all(spec[2] in places for _, kernel in kernels for spec in kernel.embedding_specs)


def steps(module: nn.Module) -> dict[str, int]:
    """Number of steps that the kernels of each collection have counted, by the collection's name."""
    return steps_of(kernels_by_collection(module))


def steps_of(kernels: Iterable[tuple[str, SplitTableBatchedEmbeddingBagsCodegen]]) -> dict[str, int]:
    """The same, for kernels that :func:`kernels_by_collection` has found.

    Adam corrects its bias by it. The host has a copy of the count, so the device is not awaited.
    """
    counted: dict[str, int] = {}
    for name, kernel in kernels:
        counted[name] = max(counted.get(name, 0), int(kernel.iter_cpu))
    return counted


def steps_of_all_ranks(by_rank: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The steps of all collections, from what :func:`steps` gives on each rank, which lacks those without a table there."""
    return {name: max(counted.get(name, 0) for counted in by_rank) for counted in by_rank for name in counted}


def set_steps(module: nn.Module, counted: Mapping[str, int]) -> None:
    """Set the step counts to ``counted``, as :func:`steps` returned them."""
    for name, kernel in kernels_by_collection(module):
        if name in counted:
            set_count([kernel], counted[name])


def count_training_lookups_only(module: nn.Module) -> None:
    """Make FBGEMM's kernels not count look-ups without a gradient. Adam corrects its bias by the count of training steps."""
    counting = [TABLE_OPTIMIZERS[name] for name in MOMENT_OPTIMIZERS]
    for kernel in kernels_in(module):
        if kernel.optimizer in counting:
            kernel.register_forward_hook(_take_back_the_count)


def _take_back_the_count(kernel: SplitTableBatchedEmbeddingBagsCodegen, _: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        set_count([kernel], int(kernel.iter_cpu) - 1)


def set_count(kernels: Iterable[SplitTableBatchedEmbeddingBagsCodegen], count: int) -> None:
    """Set the number of steps that ``kernels`` have counted."""
    for kernel in kernels:
        kernel.iter_cpu.fill_(count)
        kernel.iter.fill_(count)


# ---- learning rate -------------------------------------------------------------------------------------------------
def follow_learning_rate(fused: Any, base: Sequence[float], dense: torch.optim.Optimizer) -> None:
    """Scale the tables' learning rates by the same factor as the rate of ``dense``. FBGEMM reads the rates in forward.

    Args:
        fused: optimizer of the tables.
        base: initial learning rate of each of its groups.
        dense: the model's first optimizer. A scheduler may change its learning rate.
    """
    if not base:
        return
    group = dense.param_groups[0]
    initial = group.get("initial_lr", group["lr"])
    scale = group["lr"] / initial if initial else 1.0
    for own, rate in zip(fused.param_groups, base, strict=True):
        own["lr"] = rate * scale
    fused.step()  # passes the rates to the kernels; changes no weight


# ---- updates of the prioritized exchange ---------------------------------------------------------------------------
@dataclass(frozen=True)
class UpdateSettings:
    """What the update of a batch's rows depends on, apart from the gradients. Fixed in the forward of the batch's step."""

    learning_rates: list[float]  # of each group of the fused optimizer
    step: int  # number of the training step, from 1
    divide_by_ranks: bool  # whether TorchRec divides gradients by the number of ranks


class ModuleOptimizer:
    """The fused optimizer of one sharded module, for updates that run later than their own step.

    The kernels count each lookup as a step and use the present learning rate. The prioritized exchange updates the rows of one
    step in two lookups, and one of them runs in the next step. So it sets count and rate before each of them.
    """

    def __init__(self, module: ShardedEmbeddingCollection):
        self._module, self._kernels = module, kernels_of(module)
        self._step = 0  # training steps of this module

    def continue_count(self) -> None:
        """Take over the step count of the kernels, after steps with TorchRec's own exchange."""
        self._step = max((int(kernel.iter_cpu) for kernel in self._kernels), default=0)

    def begin_step(self, counts: bool = True) -> UpdateSettings:
        """Count a training step. Its rows are updated with the settings that hold now.

        Args:
            counts: False for a micro-batch of gradient accumulation. The update after the last one counts as a step.
        """
        step = self._step + 1
        if counts:
            self._step = step
        return UpdateSettings(self.learning_rates(), step, get_gradient_division())

    def learning_rates(self) -> list[float]:
        return [group["lr"] for group in self._module.fused_optimizer.param_groups]

    def set_learning_rates(self, rates: list[float]) -> None:
        optimizer = self._module.fused_optimizer
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.step()  # passes the rates to the kernels; changes no weight

    def count_next_lookup_as(self, step: int) -> None:
        """Make the kernels count the next lookup as training step number ``step``."""
        set_count(self._kernels, step - 1)

    def restore_count(self) -> None:
        """Set the kernels' count to the number of training steps of this module, whatever they have counted since."""
        set_count((kernel for kernel in self._kernels if int(kernel.iter_cpu) != self._step), self._step)
