"""``FreeScaleStrategy``: Lightning's hooks, in the order of a step. It conducts; the instruments are in the other modules.

Long because Lightning has many hooks: each is a few lines that call an instrument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.balance.balancer import Balancer
from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.exchange import ExchangeLoader
from lightning_freescale.balance.planner import Planner
from lightning_freescale.batch.checks import check_batch
from lightning_freescale.batch.contents import find_parts
from lightning_freescale.bubbles.monitor import BubbleMonitorMixin, add_monitor
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding import plan as tables
from lightning_freescale.embedding import table_optimizer as table_state
from lightning_freescale.embedding.exchange_mode import Paths
from lightning_freescale.embedding.mode_trial import Verdict
from lightning_freescale.embedding.schedule import Schedule
from lightning_freescale.embedding.shard import shard
from lightning_freescale.runtime.errors import ConfigurationError, FreeScaleError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import SideStream
from lightning_freescale.strategy import loss_weighting as means
from lightning_freescale.strategy import staging
from lightning_freescale.strategy.checkpoint_hooks import FITTING, CheckpointHooks
from lightning_freescale.strategy.control import Control
from lightning_freescale.strategy.loss_weighting import REDUCTIONS, loss_weight
from lightning_freescale.strategy.prefetch import DEPTH, LookaheadLoader
from lightning_freescale.strategy.progress import read_bars_late, settle_bars
from lightning_freescale.strategy.refusals import refuse_accumulation, refuse_inexact
from lightning_freescale.strategy.sigterm import take_over

if TYPE_CHECKING:  # the mixin stands on DDPStrategy of either Lightning namespace
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

FIT_EVERY = 50  # steps between two updates of the cost model


class FreeScaleMixin(CheckpointHooks, _Base):
    """Trains models with sharded TorchRec embeddings; everything but the tables is data parallel.

    The user's LightningModule stays as it is: an ordinary ``training_step(self, batch, batch_idx)`` and members of type
    ``torchrec.EmbeddingCollection`` or ``torchrec.EmbeddingBagCollection``, on any device (``meta`` for tables larger than
    one rank's memory).

    Args:
        sharding: ``"row_wise"``, ``"table_wise"`` or ``"column_wise"`` for all tables, or a mapping from table names to one
            of them. Default: row-wise; tables with fewer than 16 rows a rank stay whole on one rank.
        embedding_optimizer: optimizer of the tables, e.g. ``{"optimizer": "rowwise_adagrad", "lr": 0.02}``; one of ``sgd``,
            ``adagrad``, ``rowwise_adagrad`` and, on CUDA, ``adam``. It runs inside backward. Its learning rate follows the
            scheduler of the model's first optimizer: same relative change.
        balance: how samples move between ranks so that all have the same work: ``"fixed"`` (equal sample counts),
            ``"variable"`` (counts as they come), ``"zigzag"``, a :class:`~lightning_freescale.balance.Planner`, or
            ``"off"``. It takes effect for train loaders that are not balanced at the source already, as
            ``SeqRecDataModule``'s are; the global batch of a step and its gradient stay what they were.
        fit_costs: learn what a sample costs, and with ``"variable"`` how fast each rank is, from the compute times of the
            ranks' steps, and plan by that: ``True`` every 50 steps, a number every so many. Which rank trains which sample
            then depends on measured times: two runs differ in rounding. By default costs are those of the model's FLOPs,
            ``cost_coefficients()``.
        prioritize: ``True``: rows that the next batch does not share are exchanged behind dense compute, shared ones first;
            the training stays the same bit for bit. ``False``: every exchange is synchronous, as TorchRec does it.
            ``"auto"``: the first steps try both, and the faster path stays.
        dedup: ask for each distinct row of a batch once and sum its gradients before sending them (CUDA only).
        transport: what moves ids, rows and gradients. ``"host"``: copy engines and host memory, which takes no GPU cores from
            the compute beside it. ``"auto"``: gloo on CPU; on CUDA ``"host"`` where exchanges are prioritized, hence
            overlapped, and all ranks share a host, and NCCL otherwise.
        loss_reduction: what the loss of ``training_step`` is a mean over, ``"sample"`` or ``"token"`` (events of the
            histories). Ranks may hold different numbers of them: each rank's loss is weighted by its share, so that the
            gradient is that of the mean over the global batch. A model's own attribute ``loss_reduction`` comes first.
        timeout: seconds (or a ``timedelta``) after which a wait for another rank is an error.
        monitor: measure the bubbles and log them, where the Trainer has a logger.
        ddp_kwargs: as for :class:`lightning.pytorch.strategies.DDPStrategy`.
    """

    strategy_name = "freescale"
    # Each Lightning namespace has its own classes: the two thin modules that complete this mixin name theirs.
    _sigterm_exception: type[BaseException]
    _is_overridden: Callable[[str, object], bool]
    _monitor_type: type[BubbleMonitorMixin]

    def __init__(
        self,
        *,
        sharding: Mapping[str, str] | str | None = None,
        embedding_optimizer: Mapping[str, Any] | None = None,
        balance: Literal["fixed", "variable", "zigzag", "off"] | Planner = "fixed",
        fit_costs: bool | int = False,
        prioritize: bool | Literal["auto"] = "auto",
        dedup: bool = False,
        transport: Literal["auto", "nccl", "gloo", "host"] = "auto",
        loss_reduction: Literal["sample", "token"] = "sample",
        timeout: float | timedelta = 600.0,
        monitor: bool = True,
        **ddp_kwargs: Any,
    ) -> None:
        if ddp_kwargs.get("start_method", "popen") != "popen":
            raise ConfigurationError(
                f"start_method={ddp_kwargs['start_method']!r}: sharded tables cannot be handed back by spawned or forked "
                "processes; use the default launcher (or torchrun)"
            )
        self._wait = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        super().__init__(timeout=self._wait, **ddp_kwargs)
        self._sharding, self._embedding_optimizer = sharding, embedding_optimizer
        self._balance, self._prioritize, self._transport = balance, prioritize, transport
        if fit_costs < 0:
            raise ConfigurationError(f"fit_costs: True, False or a number of steps, not {fit_costs}")
        every = FIT_EVERY if fit_costs is True else int(fit_costs)
        self._balancer = Balancer(balance, timeout=self._wait, every=every, prefetched=DEPTH)
        self._loss_reduction, self._dedup = loss_reduction, dedup
        self._monitor = monitor
        self.timeline = Timeline()
        self._sharded: DistributedModelParallel | None = None
        self._rows: dict[str, int] = {}
        self._base_lr: list[float] = []
        self._table_steps: dict[str, int] = {}
        self._copies: SideStream | None = None
        self.control: Control | None = None
        self._paths = Paths(prioritize, transport, self._wait)
        self._train_loader: LookaheadLoader | None = None
        self._stepping = False  # in training_step

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            "freescale", cls, description="FreeScale: sharded, balanced, overlapped", override=True
        )
        strategy_registry.register(
            "freescale_sync",
            cls,
            description="The baseline of FreeScale: TorchRec's sharding alone",
            override=True,
            balance="off",
            prioritize=False,
        )

    @property
    def schedule(self) -> Schedule | None:
        """Of the prioritized exchange, if steps take it."""
        return self._paths.schedule

    @property
    def verdict(self) -> Verdict | None:
        """Of ``prioritize="auto"``, once it is known."""
        return self._paths.verdict

    @property
    def _module(self) -> Any:
        """The user's LightningModule: the Trainer connects it before it calls any hook."""
        return self.lightning_module

    # ---- set-up: process groups, then the model ---------------------------------------------------------------------
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.control is None:
            self.control = Control(self._wait)
        if self._copies is None:
            self._copies = SideStream(self.root_device)
        if self._monitor and self._module.trainer.state.fn == FITTING:
            add_monitor(self._module.trainer, self._monitor_type)

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        refuse_inexact(trainer, str(self.precision_plugin.precision), self._module)
        self._paths.choose_transport(self.root_device, one_host=self.num_nodes == 1)
        fitting = trainer.state.fn == FITTING
        assert self.model is not None
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.precision_plugin.convert_module(self.model)
        self._shard()
        if fitting:
            self.setup_optimizers(trainer)
            assert self.control is not None
            take_over(trainer, self.control, self.launcher)
            read_bars_late(trainer)
            self._paths.open(self._module, self.root_device, self.control.gather, self._copies, self.timeline)
            self._balancer.watch(self._module, self.root_device)
        self.setup_precision_plugin()

    def _shard(self) -> None:
        module = self._module
        done = getattr(module, "_freescale", None)
        if done is None:
            done = self._rows, self._sharded = tables.rows_by_feature(module), self._wrap(module)
            # Kept on the module, out of reach of nn.Module's registration: another Trainer may use the same model later.
            object.__setattr__(module, "_freescale", done)
        self._rows, self._sharded = done
        self._base_lr = [group["lr"] for group in self._sharded.fused_optimizer.param_groups]
        self.model = self._sharded._dmp_wrapped_module

    def _wrap(self, module: torch.nn.Module) -> DistributedModelParallel:
        if not tables.embedding_modules(module):
            log_once(
                "the model has no EmbeddingCollection or EmbeddingBagCollection: nothing is sharded, it trains data parallel"
            )
        return shard(
            module,
            self._paths.table_group(),
            self.root_device,
            local_size=self.num_processes,
            sharding=self._sharding,
            optimizer=self._embedding_optimizer,
            dedup=self._dedup,
            ddp_kwargs=self._ddp_kwargs,
        )

    def model_to_device(self) -> None:
        """Nothing to do: sharding has placed the tables and moved the dense part."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        assert self._sharded is not None
        fused = {id(parameter) for parameter in self._sharded.fused_optimizer.params.values()}
        fused |= {id(p) for p in self._module.parameters() if hasattr(p, "_in_backward_optimizers")}
        for optimizer in self.optimizers:  # the user wrote Adam(self.parameters()); the tables have their own optimizer
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in fused]

    def _stop_together(self) -> None:
        self._module.trainer._signal_connector.received_sigterm = True
        raise self._sigterm_exception

    # ---- data: batches are checked and copied as soon as they are fetched ----------------------------------------------
    def process_dataloader(self, dataloader: object) -> LookaheadLoader:
        trainer = self._module.trainer
        assert self.control is not None
        training = trainer.training
        if training:
            if any(loader is self._train_loader for loader in tree_leaves(trainer.train_dataloader)):
                self._balancer.detach()  # reload_dataloaders_every_n_epochs
            dataloader = self._balancer.attach(
                dataloader,
                cost_model=self._cost_model(),
                check=lambda batch: check_batch(batch, self._rows),
                pin_memory=self.root_device.type == "cuda",
            )
        loader = LookaheadLoader(
            dataloader,  # type: ignore[arg-type]
            stage=partial(self._stage, loader=dataloader),
            control=self.control,
            limit=(lambda: trainer.num_training_batches) if training else (lambda: float("inf")),
            on_stop=self._stop_together,
            timeline=self.timeline if training else None,
        )
        if training:
            self._train_loader = loader
        return loader

    def _cost_model(self) -> CostModel | None:
        """What a sample costs, if the model tells: HSTU's ``cost_coefficients``, or a user's method of that name."""
        if not hasattr(self._module, "cost_coefficients"):
            return None
        linear, quadratic, candidate = self._module.cost_coefficients()
        return CostModel(linear=linear, quadratic=quadratic, candidate=candidate)

    def _stage(self, batch: Any, loader: object) -> tuple[Any, int, Any]:
        if not (isinstance(loader, ExchangeLoader) and loader.checked):  # samples are checked before they travel
            check_batch(batch, self._rows)
        weight, sums = loss_weight(batch, self._reduction()), self._balancer.sums(batch)
        trainer = self._module.trainer
        if self._has_hook("on_before_batch_transfer"):
            return batch, weight, sums  # Lightning calls the user's hook on it when the batch is due
        batch = trainer.precision_plugin.convert_input(batch)
        lightnings = super().batch_to_device

        def move() -> Any:
            ours = self.root_device.type == "cuda" and not self._has_hook("transfer_batch_to_device")
            return lightnings(staging.to_device(batch, self.root_device) if ours else batch, dataloader_idx=0)

        assert self._copies is not None
        with self.timeline.span("h2d", stream=self._copies.stream):
            return staging.copy_ahead(move, self._copies), weight, sums

    def _has_hook(self, name: str) -> bool:
        """Whether the user's module or data module has a transfer hook of its own."""
        hooks = self._module.trainer._data_connector._datahook_selector
        return self._is_overridden(name, hooks.get_instance(name))

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        staged, found = staging.unwrap(batch)
        return staged if found else super().batch_to_device(batch, device, dataloader_idx)

    # ---- a step --------------------------------------------------------------------------------------------------------
    def on_train_start(self) -> None:
        super().on_train_start()
        # Reading trainer.estimated_stepping_batches in configure_optimizers() drops the loader's state (Lightning #20550).
        fit_loop = self._module.trainer.fit_loop
        fit_loop._load_combined_loader_states()
        if self._train_loader is not None and self._train_loader.shift:
            # On another number of ranks the epoch has other batches: count those that the samples done so far make.
            progress = fit_loop.epoch_loop.batch_progress.current
            for count in ("ready", "started", "processed", "completed"):
                setattr(progress, count, getattr(progress, count) + self._train_loader.shift)
            self._train_loader.shift = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        refuse_accumulation(self._module.trainer)
        assert self._sharded is not None
        if self.optimizers:
            table_state.follow_learning_rate(self._sharded.fused_optimizer, self._base_lr, self.optimizers[0])
        self._paths.choose()
        if self.schedule is not None:
            self.schedule.begin_step(*self._features_ahead(args[0]))
        if self._train_loader is not None:
            self._balancer.begin_step(self._train_loader.note, self._train_loader.batches)
        with self._logging_over_the_global_batch():
            output = super().training_step(*args, **kwargs)
        self._balancer.stopwatch.end_forward()
        return output

    @contextmanager
    def _logging_over_the_global_batch(self) -> Iterator[None]:
        """Weight what is logged inside by samples or tokens, as the loss is, unless ``log`` is told a batch size."""
        weights = self._loss_weights()
        results = self._module.trainer._results
        if results is not None and weights:
            results.batch_size = weights[self.global_rank]  # Lightning would take the first dimension of some tensor
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As Lightning's, but a mean that ``training_step`` logs with ``sync_dist=True`` is one over the global batch."""
        with self._balancer.stopwatch.waiting():
            if isinstance(tensor, Tensor) and reduce_op in means.MEANS:
                if not tensor.is_floating_point():
                    total = super().reduce(tensor.clone(), group, "sum")
                    return means.mean_of_counts(total, torch.distributed.get_world_size(group))
                if self._stepping and group in (None, torch.distributed.group.WORLD):
                    tensor = means.weigh(tensor, self._loss_weights(), self.global_rank)
            return super().reduce(tensor, group, reduce_op)

    def _loss_weights(self) -> list[int]:
        """Samples or tokens of every rank in the current batch; none if they are not known."""
        return [] if self._train_loader is None else [header.weight for header in self._train_loader.headers]

    def _features_ahead(self, batch: Any) -> list[list[KeyedJaggedTensor]]:
        """The KeyedJaggedTensors of this batch and of the next two; empty lists where there is no batch."""
        upcoming = [self._train_loader.upcoming(k) if self._train_loader is not None else None for k in (1, 2)]
        return [list(find_parts(part, KeyedJaggedTensor)) for part in (batch, *map(staging.peek, upcoming))]

    def _reduction(self) -> str:
        """What the model's loss is a mean over: its own word (an attribute ``loss_reduction``) before the strategy's."""
        reduction = getattr(self._module, "loss_reduction", None) or self._loss_reduction
        if reduction not in REDUCTIONS:
            raise ConfigurationError(f"loss_reduction={reduction!r} is unknown; choose one of {', '.join(REDUCTIONS)}")
        return reduction

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Weight the loss by this rank's share of the global batch: averaged over ranks, it is the global mean then."""
        if (share := means.share(self._loss_weights(), self.global_rank)) != 1.0:
            closure_loss = closure_loss * share
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._balancer.stopwatch.end_forward()  # with manual optimization, training_step goes on
        assert self.control is not None
        self.control.watch_loss(self._module.trainer.global_step, closure_loss)
        if self.schedule is not None:
            self.schedule.before_backward()
        self._balancer.stopwatch.begin_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._balancer.stopwatch.end_step()
        if self.schedule is not None:
            self.schedule.after_backward()

    def flush(self) -> None:
        """Apply every embedding gradient that is still under way: nobody may look at the tables before."""
        if self.schedule is not None:
            self.schedule.flush()

    def on_train_end(self) -> None:
        super().on_train_end()
        assert self.control is not None
        self.flush()
        self.control.check_losses()
        settle_bars(self._module.trainer)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.flush()
        self._table_steps = table_state.steps(self._module)

    def on_validation_end(self) -> None:
        super().on_validation_end()
        table_state.set_steps(self._module, self._table_steps)  # validation's lookups are no training steps

    # ---- the end ------------------------------------------------------------------------------------------------------
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if (
            self.control is None
            or self.control.world_size == 1
            or isinstance(exception, (FreeScaleError, KeyboardInterrupt))
        ):
            return  # our own errors name the rank already
        trainer = self._module.trainer
        exception.add_note(
            f"rank {self.global_rank} of {self.world_size}, step {trainer.global_step}: {self.control.last_words(exception)}"
        )

    def teardown(self) -> None:
        self._balancer.close()
        # As Lightning's, without moving the model to the CPU: sharded tables stay on their devices.
        self._paths.close()
        if isinstance(self.model, DistributedDataParallel):
            self.model = self._module
        if self._layer_sync and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
