"""Settings under which the training would differ from plain TorchRec. They are refused, or a log line names them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardedModule

from lightning_freescale.balance.planner import Planner
from lightning_freescale.balance.sampler import GlobalBatchSampler
from lightning_freescale.embedding.plan import embedding_modules
from lightning_freescale.embedding.table_optimizer import MOMENT_OPTIMIZERS
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.lightning_compat import parameters_to_prune
from lightning_freescale.runtime.log import log_once
from lightning_freescale.strategy.checkpoints.host_copies.options import HostCopies

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
# These callbacks average all parameters of the model. They cannot average sharded tables.
WEIGHT_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


def refuse_inexact(trainer: Any, precision: str) -> None:
    """Raise :class:`ConfigurationError` for settings of ``trainer`` that cannot be exact with sharded tables."""
    if precision not in PRECISIONS:
        reason = {
            "16-mixed": "its loss scaling cannot reach the tables, which are updated inside backward",
            "16-true": "small gradients vanish in float16 without loss scaling, which cannot reach the tables",
        }.get(precision, "the tables have no such type")
        raise ConfigurationError(
            f"precision={precision!r} is not supported: {reason}; use one of {', '.join(PRECISIONS)}"
        )
    refuse_weight_averaging(trainer)
    refuse_pruned_tables(trainer)
    if trainer.gradient_clip_val:
        log_once(
            f"gradient_clip_val={trainer.gradient_clip_val} clips the dense parameters. The tables are updated inside "
            "backward, row by row, and are not part of the norm"
        )


def refuse_model_averaging(period: int | None) -> None:
    """Refuse DDP's averaging of models after several local steps: the tables are updated on all ranks in every step."""
    if period is not None:
        raise ConfigurationError(
            f"model_averaging_period={period}: the ranks would train their dense parameters apart, while they share the "
            "tables. Leave model_averaging_period and post-local SGD out"
        )


def refuse_start_method(method: str) -> None:
    """Refuse launchers that copy the model between processes."""
    if method != "popen":
        raise ConfigurationError(
            f"start_method={method!r}: spawned or forked processes cannot return sharded tables; use the default launcher "
            "or torchrun"
        )


def refuse_weight_averaging(trainer: Any) -> None:
    """Refuse callbacks that average the weights: they copy the model before its tables are sharded."""
    for callback in trainer.callbacks:
        names = {kind.__name__ for kind in type(callback).__mro__}
        if names & set(WEIGHT_AVERAGING):
            raise ConfigurationError(
                f"{type(callback).__name__} averages all parameters, and the tables are sharded over the ranks. Average "
                "the dense parameters with a callback of your own, or train without weight averaging"
            )


def refuse_pruned_tables(trainer: Any) -> None:
    """Refuse a ``ModelPruning`` that has chosen tables: it would prune the parameters that sharding has replaced."""
    model = trainer.lightning_module
    tables = {part for collection in embedding_modules(model).values() for part in collection.modules()}
    tables |= {part for child in model.modules() if isinstance(child, ShardedModule) for part in child.modules()}
    names = {part: name for name, part in model.named_modules()}
    for callback in trainer.callbacks:
        if not any(kind.__name__ == "ModelPruning" for kind in type(callback).__mro__):
            continue
        found = [f"{names.get(part)}.{name}" for part, name in parameters_to_prune(callback) if part in tables]
        if found:
            raise ConfigurationError(
                f"ModelPruning would prune {', '.join(found)}, but the tables are sharded over the ranks. Name the parameters "
                "that are to be pruned, for example parameters_to_prune=[(model.head, 'weight')]. Without that it takes all"
            )


def called_once(closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
    """``closure``, which computes the loss and its gradients, with an error if an optimizer calls it again in the same step."""
    calls = 0

    def call() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ConfigurationError(
                f"{type(optimizer).__name__} computes the gradients several times in a step. The tables are updated in every "
                "backward, so they would take several steps. Use an optimizer that computes them once"
            )
        return closure()

    return call


def check_types(**options: Any) -> None:
    """Refuse values of other types than those of the strategy's options. A text such as "off" would count as true."""
    allowed = {
        "prioritize": ("True, False or 'auto'", lambda value: isinstance(value, bool) or value == "auto"),
        "monitor": ("True or False", lambda value: isinstance(value, bool)),
        "fit_costs": ("True, False or a number of steps", lambda value: isinstance(value, int)),
        "host_copies": ("None or fs.HostCopies(...)", lambda value: value is None or isinstance(value, HostCopies)),
        "timeout": ("a positive number of seconds, or a timedelta", lambda value: value.total_seconds() > 0),
    }
    for name, value in options.items():
        what, fits = allowed[name]
        if not fits(value):
            raise ConfigurationError(f"{name}={value!r}: must be {what}")


@functools.cache
def _known_options(strategy: type) -> frozenset[str]:
    """The names of the options that the classes of a strategy and DDP know. To read them takes 10 ms."""
    kinds = (*strategy.__mro__, DistributedDataParallel)
    return frozenset(name for kind in kinds for name in inspect.signature(kind).parameters)


def check_ddp_options(options: Mapping[str, Any], strategy: type) -> None:
    """Refuse options that neither DDP knows nor the classes that ``strategy`` is made of, such as Lightning's DDP strategy."""
    refuse_start_method(options.get("start_method", "popen"))
    for name in options:
        if name not in _known_options(strategy):
            raise ConfigurationError(
                f"{name}={options[name]!r}: unknown option of the strategy, and of DistributedDataParallel"
            )


def check_options(fit_costs: float, uneven: str, embedding_optimizer: Mapping[str, Any] | None) -> None:
    """Refuse unknown options of the strategy, and options that do not go together."""
    if fit_costs < 0:
        raise ConfigurationError(f"fit_costs: True, False or a number of steps, not {fit_costs}")
    if uneven not in ("error", "stop", "continue"):
        raise ConfigurationError(f"uneven={uneven!r} is unknown; choose one of error, stop, continue")
    options = embedding_optimizer or {}
    if uneven == "continue" and (options.get("optimizer") in MOMENT_OPTIMIZERS or options.get("weight_decay")):
        raise ConfigurationError(
            "uneven='continue': a rank without data repeats its last batch with weight 0, and Adam, LAMB or weight decay of the "
            "tables would change its rows all the same. Use uneven='stop', or another embedding_optimizer"
        )


def refuse_to_move_coupled_samples(module: nn.Module, planner: Planner | None, whose: str) -> None:
    """Refuse to balance samples that the model declares to influence each other.

    Args:
        planner: how samples are balanced; None if they are not.
        whose: whose setting ``balance`` it is.
    """
    if planner is not None and getattr(module, "couples_samples", False):
        raise ConfigurationError(
            f"balance={planner.mode!r} of the {whose} moves samples between ranks, but {type(module).__name__} declares "
            f"couples_samples = True, so its training would change. Set balance='auto' or 'off' in the {whose}"
        )


def refuse_another_number_of_ranks(sampler: GlobalBatchSampler, world_size: int) -> None:
    """Refuse a loader of ``SeqRecDataModule`` that was made before the Trainer knew the ranks: all would read all samples."""
    if sampler.num_replicas != world_size:
        raise ConfigurationError(
            f"the loader was made for {sampler.num_replicas} ranks, but there are {world_size}. Pass the data module itself, "
            "as trainer.fit(model, datamodule=data), and not its loader"
        )


def name_coupled_samples(module: nn.Module) -> None:
    """Log that balancing changes a model whose samples influence each other."""
    norms = [name for name, child in module.named_modules() if isinstance(child, nn.modules.batchnorm._BatchNorm)]
    if norms:
        log_once(
            f"balance: {norms[0]} is a BatchNorm layer, so the samples of a rank influence each other, and moving samples "
            "between ranks changes the training. Set couples_samples = True on the model to keep samples on their rank"
        )
