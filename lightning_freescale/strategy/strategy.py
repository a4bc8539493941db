"""``FreeScaleStrategy``: its options, its set-up and its end. Each hook calls the modules that do the work.

The hooks of a training step are in ``step_hooks.py``, those of checkpoints in ``checkpoints/``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan

from lightning_freescale.balance.balancer import Balancer
from lightning_freescale.balance.planner import Planner, without_booleans
from lightning_freescale.bubbles.monitor import BubbleMonitorMixin, add_monitor
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding.distinct_ids import check_dedup
from lightning_freescale.embedding.exchange_mode import ExchangeMode
from lightning_freescale.embedding.mode_trial import ModeChoice
from lightning_freescale.embedding.plan import embedding_modules
from lightning_freescale.embedding.table_optimizer import reset_state
from lightning_freescale.embedding.user_plan import check_plan_options
from lightning_freescale.embedding.wire import parse_wire
from lightning_freescale.runtime import lightning_compat as compat
from lightning_freescale.runtime.frozen_objects import FrozenObjects
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import SideStream
from lightning_freescale.strategy.accumulation import GradientAccumulation
from lightning_freescale.strategy.checkpoints.format import check_option as check_format
from lightning_freescale.strategy.checkpoints.host_copies.options import HostCopies
from lightning_freescale.strategy.checkpoints.incremental import Incremental
from lightning_freescale.strategy.connecting import BoundedSetup
from lightning_freescale.strategy.control import Control, Request
from lightning_freescale.strategy.expert_groups import ExpertGroup
from lightning_freescale.strategy.failing import NamedFailures, call_all
from lightning_freescale.strategy.pipeline import BatchPipeline
from lightning_freescale.strategy.prefetch import PREFETCH_DEPTH
from lightning_freescale.strategy.progress_bar import show_late_values
from lightning_freescale.strategy.refusals import (
    check_ddp_options,
    check_options,
    check_types,
    name_coupled_samples,
    refuse_inexact,
    refuse_model_averaging,
    refuse_to_move_coupled_samples,
)
from lightning_freescale.strategy.sharded_model import ShardedModel, shard_once, was_sharded_with_tables
from lightning_freescale.strategy.signals import SignalRequests
from lightning_freescale.strategy.step_hooks import StepHooks
from lightning_freescale.strategy.table_learning_rate import TableLearningRates, take_tables_out
from lightning_freescale.strategy.true_precision import convert_dense_part, convert_outputs

if TYPE_CHECKING:  # The mixin completes the DDPStrategy of either Lightning namespace.
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

FIT_INTERVAL = 50  # Steps between two updates of the cost model, with fit_costs=True.


class FreeScaleMixin(StepHooks, NamedFailures, BoundedSetup, _Base):
    """Trains models with sharded TorchRec tables. All other parameters are data parallel.

    The user's LightningModule needs no change. It has an ordinary ``training_step(self, batch, batch_idx)`` and members
    of type ``torchrec.EmbeddingCollection`` or ``torchrec.EmbeddingBagCollection``, on any device. Tables that are
    larger than the memory of one rank are declared on ``meta``. A model without tables trains as with plain DDP.

    Args:
        sharding: ``"row_wise"``, ``"table_wise"`` or ``"column_wise"`` for all tables, or a mapping from table names to
            one of them. By default tables are sharded row-wise; a table with fewer than 16 rows per rank stays whole
            on one rank.
        plan: a TorchRec ``ShardingPlan`` of your own, with an entry for each collection, by its name in the model.
        constraints: TorchRec's ``ParameterConstraints`` by table name. TorchRec's ``EmbeddingShardingPlanner`` then makes
            the plan.
        topology: TorchRec's ``Topology`` for the planner.
        embedding_optimizer: the optimizer of the tables, for instance ``{"optimizer": "rowwise_adagrad", "lr": 0.02}``.
            The choices are ``sgd``, ``adagrad``, ``rowwise_adagrad``, ``adam``, ``lamb``, ``partial_rowwise_adam`` and
            ``partial_rowwise_lamb``. It runs inside backward.
            Its learning rate changes in proportion to the rate of the parameter group that holds the table.
        balance: how samples move between ranks, so that all ranks have equal work. ``"fixed"`` keeps sample counts
            equal, ``"variable"`` does not, ``"zigzag"`` is the paper's fixed batch size, ``"off"`` or ``False`` moves nothing,
            and a :class:`~lightning_freescale.balance.Planner` sets everything. ``"auto"`` is ``"fixed"`` for models with
            tables whose samples are independent, and ``"off"`` otherwise. It applies to train loaders that are not
            balanced at the source, as those of ``SeqRecDataModule`` are. The global batch of a step stays the same.
        fit_costs: learn the cost of a sample (and with ``"variable"`` the speed of each rank) from the compute times of
            the steps. ``True`` updates the costs every 50 steps, a number every that many steps. The assignment of
            samples to ranks then depends on measured times, so two runs differ in rounding. By default the costs follow
            from the FLOPs of the model, ``cost_coefficients()``.
        prioritize: ``True`` exchanges rows that consecutive batches do not share behind dense compute, and shared rows
            first. The training stays the same, on a CPU bit for bit. ``False`` exchanges synchronously, as TorchRec does.
            ``"auto"`` measures both in the first steps and keeps the faster one.
        dedup: request each distinct row of a batch once, and sum its gradients before they are sent. This changes the order
            of a sum, and so its rounding. ``"auto"`` does it for a module in whose first batch enough ids are repeated.
        wire: the type of rows and gradients while they travel: ``"float32"``, ``"bfloat16"``, or a mapping such as
            ``{"rows": "bfloat16"}``. It applies to ``EmbeddingCollection``. ``"bfloat16"`` rounds, so the training differs.
        transport: what moves ids, rows and gradients. ``"host"`` uses copy engines and host memory, so that the exchange
            takes no SMs from the compute. ``"auto"`` is gloo on CPU. On CUDA it is ``"host"`` if exchanges are
            prioritized and all ranks share a host or the hosts have RDMA and NIXL, and NCCL otherwise.
        loss_reduction: what the loss of ``training_step`` is a mean over: ``"sample"`` or ``"token"`` (events of the
            histories). The loss of each rank is weighted by its share of the global batch, so that the gradient is that
            of the mean over the global batch. An attribute ``loss_reduction`` of the model takes precedence.
        uneven: what happens when the train data of some ranks end before those of others. ``"error"`` raises on all
            ranks. ``"stop"`` ends the epoch with the shortest rank. ``"continue"`` goes on until all data are used; a
            rank without data repeats its last batch with weight 0.
        checkpoint: the format of checkpoints. ``"file"`` writes one plain Lightning file with full tensors, which every
            strategy and ``Model.load_from_checkpoint`` can read; rank 0 gathers the tables for it. ``"sharded"`` writes a
            folder to which every rank adds its shards. ``"auto"`` writes a file if there is one rank or if all tables
            together take at most 256 MiB, and a folder otherwise. Either can be loaded on any number of ranks.
            ``fs.Incremental()`` writes folders with the rows that have changed since the last full one.
        host_copies: ``fs.HostCopies()`` keeps copies of the training state in the memory of two hosts, for fast restarts.
        timeout: seconds (or a ``timedelta``) after which a wait for another rank is an error.
        monitor: measure the bubbles and log them, if the Trainer has a logger. Plain DDP is not measured, unless you add a
            ``BubbleMonitor`` to the callbacks.
        ddp_kwargs: options of :class:`lightning.pytorch.strategies.DDPStrategy`.
    """

    strategy_name = "freescale"
    # Each Lightning namespace has its own classes. The two modules that complete this mixin name theirs.
    _sigterm_exception: type[BaseException]
    _is_overridden: Callable[[str, object], bool]
    _monitor_type: type[BubbleMonitorMixin]
    control: Control | None = None
    _copies: SideStream | None = None
    _signals: SignalRequests | None = None
    _sharded_model: ShardedModel | None = None
    _sharded: DistributedModelParallel | None = None
    _rates: TableLearningRates | None = None
    _in_training_step = False
    _in_run = False  # Whether a run of the Trainer has been set up and not torn down.

    def __init__(
        self,
        *,
        sharding: Mapping[str, str] | str | None = None,
        plan: ShardingPlan | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        topology: Topology | None = None,
        embedding_optimizer: Mapping[str, Any] | None = None,
        balance: Literal["auto", "fixed", "variable", "zigzag", "off"] | bool | Planner = "auto",
        fit_costs: bool | int = False,
        prioritize: bool | Literal["auto"] = "auto",
        dedup: bool | Literal["auto"] = False,
        wire: Mapping[str, str] | str = "float32",
        transport: Literal["auto", "nccl", "gloo", "host"] = "auto",
        loss_reduction: Literal["sample", "token"] = "sample",
        uneven: Literal["error", "stop", "continue"] = "error",
        checkpoint: Literal["auto", "file", "sharded"] | Incremental = "auto",
        host_copies: HostCopies | None = None,
        timeout: float | timedelta = 600.0,
        monitor: bool = True,
        **ddp_kwargs: Any,
    ) -> None:
        check_ddp_options(ddp_kwargs, type(self))
        self._wait = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        check_types(
            fit_costs=fit_costs, prioritize=prioritize, host_copies=host_copies, timeout=self._wait, monitor=monitor
        )
        check_options(fit_costs, uneven, embedding_optimizer)
        check_dedup(dedup)
        parse_wire(wire)
        super().__init__(timeout=self._wait, **ddp_kwargs)
        placement: dict[str, Any] = {"sharding": sharding, "plan": plan}
        placement |= {"constraints": constraints, "topology": topology}
        check_plan_options(**placement)
        self._shard_options = {**placement, "optimizer": embedding_optimizer, "dedup": dedup, "wire": wire}
        self._balance, self._prioritize, self._transport = without_booleans(balance), prioritize, transport
        check_format(checkpoint)
        self._uneven, self._monitor = uneven, monitor
        self._checkpoint_format, self._host_copies = checkpoint, host_copies
        self.timeline = Timeline()
        self._balancer = Balancer(
            "fixed" if self._balance == "auto" else self._balance,
            timeout=self._wait,
            every=FIT_INTERVAL if fit_costs is True else int(fit_costs),
            prefetched=PREFETCH_DEPTH,
        )
        self._pipeline = BatchPipeline(
            self._balancer,
            self.timeline,
            is_overridden=self._is_overridden,
            loss_reduction=loss_reduction,
            uneven=uneven,
            on_request=self._act_on_request,
            random_states=self.random_states_of_loader,
        )
        self._exchange_mode = ExchangeMode(prioritize, transport, self._wait, self._note_update)
        self._expert_group, self._frozen_objects = ExpertGroup(self._exchange_mode.new_group), FrozenObjects()
        self._accumulation = GradientAccumulation(self._exchange_mode.await_late, self._await_tables)
        self._table_positions, self._open_copies = [], []
        self._validation_steps: dict[str, int] = {}  # Step counts of the tables before a validation.

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
    def mode_choice(self) -> ModeChoice | None:
        """What ``prioritize="auto"`` has measured and chosen; ``None`` until the trial is complete."""
        return self._exchange_mode.choice

    @property
    def _module(self) -> Any:
        """The user's LightningModule. The Trainer connects it before it calls any hook."""
        return self.lightning_module

    # ---- set-up: process groups, then the model --------------------------------------------------------------------
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.control is None:
            self.control = Control(self._wait, self.root_device)
        self._failed, self._in_run, self._came_to_save = False, True, None
        compat.limit_prepare_data(self._module.trainer, self._wait)
        if self._declares_tables():
            self.control.open()
        self._copies = SideStream(self.root_device)
        trainer = self._module.trainer
        self._pipeline.open(trainer, self.control, self._copies, self.root_device)
        self.open_host_copies(trainer)

    def setup(self, trainer: Any) -> None:
        assert self.control is not None
        fitting = trainer.state.fn == compat.FITTING
        if self._declares_tables():
            self._setup_with_tables(trainer, fitting)
        else:
            self._shard()
            self.after_sharding()
            super().setup(trainer)
        if fitting and not self._is_plain_ddp:
            if self._monitor:
                add_monitor(trainer, self._monitor_type)
            self._balancer.watch(self._module, self.root_device)
            self._pipeline.balances = self._balances_samples()
            # On a CPU a short training takes less time than the collection of garbage before it would.
            if self.root_device.type == "cuda":
                self._frozen_objects.freeze()

    def _setup_with_tables(self, trainer: Any, fitting: bool) -> None:
        """What :meth:`DDPStrategy.setup` does, for a model that is sharded and not only wrapped in DDP."""
        assert self.accelerator is not None
        assert self.control is not None
        assert self.model is not None
        self.control.open()
        self.accelerator.setup(trainer)
        self._exchange_mode.forget_failed_groups(self.control.gather)
        self._exchange_mode.choose_transport(self.root_device, one_host=self.num_nodes == 1)
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        precision = str(self.precision_plugin.precision)
        refuse_inexact(trainer, precision)
        refuse_model_averaging(self._model_averaging_period)
        convert_dense_part(self.precision_plugin, self.model)
        self._shard()
        convert_outputs(self._module, precision)
        self.after_sharding()
        if fitting:
            if isinstance(self.model, DistributedDataParallel) and not self.model._comm_hooks:
                self._register_ddp_hooks()  # An earlier fit of the same model may have registered the hook already.
            self.setup_optimizers(trainer)
            self._signals = SignalRequests(trainer, self.control, self.launcher, self._sigterm_exception)
            show_late_values(trainer)
            gather, ask = self.control.gather, self.control.ask
            self._exchange_mode.open(self._module, self.root_device, gather, ask, self._copies, self.timeline)
            self.complete_tables_for_callbacks(trainer)
            self._expert_group.open(self._module)
        self.watch_updates(trainer, fitting)
        self.setup_precision_plugin()

    @property
    def _is_plain_ddp(self) -> bool:
        """Whether the model has no tables and no option asks for more than DDP. Then this strategy adds nothing to a step."""
        return not self._has_tables and self._balance == "auto" and self._uneven == "error"

    def _declares_tables(self) -> bool:
        """Whether the model has tables, before or after they are sharded."""
        return bool(embedding_modules(self._module)) or was_sharded_with_tables(self._module)

    def _shard(self) -> None:
        self._sharded_model = shard_once(
            self._module,
            self._exchange_mode.table_group,
            self.root_device,
            local_size=self.num_processes,
            options=self._shard_options,
            ddp_kwargs=self._ddp_kwargs,
        )
        self._sharded, self._pipeline.rows = self._sharded_model.sharded, self._sharded_model.rows
        if self._sharded is not None:
            self.model = self._sharded._dmp_wrapped_module

    def _balances_samples(self) -> bool:
        """Whether samples may move between ranks. A model can declare that its samples influence each other."""
        if self._balance == "auto" and getattr(self._module, "couples_samples", False):
            log_once("balance='auto': off, because the model declares couples_samples = True")
            return False
        if self._balance != "off":
            refuse_to_move_coupled_samples(self._module, self._balancer.planner, "strategy")
            name_coupled_samples(self._module)
        return True

    def model_to_device(self) -> None:
        if not self._has_tables:  # Sharding has placed the tables and moved the dense part.
            super().model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self._table_positions, self._rates = [], None
        if self._sharded is None:
            return
        assert self._sharded_model is not None
        reset_state(self._sharded)  # A second fit starts with new optimizers. A checkpoint is restored later.
        self._rates = TableLearningRates(
            self._sharded,
            self._sharded_model.rates,
            explicit="lr" in (self._shard_options["optimizer"] or {}),
            frozen=self._sharded_model.frozen,
        )
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self._rates.follow(self._module, self.optimizers, schedulers)
        self._table_positions = take_tables_out(self.optimizers, self._sharded.fused_optimizer.params.values())

    def _act_on_request(self, request: Request) -> None:
        if self._signals is not None:
            self._signals.act_on(request)

    # ---- batches ---------------------------------------------------------------------------------------------------
    def process_dataloader(self, dataloader: object) -> Any:
        if not self._is_plain_ddp:
            return self._pipeline.wrap(dataloader)
        self.before_plain_loader_opens()
        return dataloader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        training = self._module.trainer.training
        if training:
            self.before_training_batch()
        if self._is_plain_ddp:
            return super().batch_to_device(batch, device, dataloader_idx)
        move = super().batch_to_device
        return self._pipeline.receive(
            batch, dataloader_idx, lambda plain: move(plain, device, dataloader_idx), training
        )

    # ---- the end ---------------------------------------------------------------------------------------------------
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if not self._in_run and self.control is not None:
            self.control.close()  # trainer.save_checkpoint() after fit() has opened it again.

    def teardown(self) -> None:
        steps = [self.unwatch_updates, self.abandon_copies, self.close_saves, self.before_tables_change, self._close]
        call_all(steps, after_failure=self._failed)
        if self.lightning_module is None or not self._declares_tables():
            self.end_after_failure([super().teardown])
            return
        # This replaces Lightning's teardown, which would move the model to the CPU. Sharded tables stay on their device.
        if isinstance(self.model, DistributedDataParallel):
            self.model = self._module
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        parts = (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io)
        self.end_after_failure([self._revert_layers, *(part.teardown for part in parts)])

    def _revert_layers(self) -> None:
        if self._layer_sync and self.model is not None:
            self.model = self._layer_sync.revert(self.model)

    def _close(self) -> None:
        """End threads and leave process groups that this run has opened. The next run opens its own.

        The group on which the sharded tables exchange stays open, because the model can be used again.
        """
        if self.root_device.type == "cuda" and not self._failed:
            torch.cuda.synchronize(self.root_device)  # No kernel of a group that is about to end is in the queue.
        groups = (self._exchange_mode, self._expert_group)
        parts: list[Callable[[], None]] = [self._frozen_objects.release, self._balancer.close, self._accumulation.close]
        parts += [functools.partial(part.close, self._failed) for part in groups]
        parts += [self._pipeline.close] if self.control is None else [self._pipeline.close, self.control.close]
        call_all(parts, after_failure=self._failed)
        if self.lightning_module is not None:
            compat.limit_prepare_data(self._module.trainer, None)
            compat.remove_callback(self._module.trainer, self._completing)
        self._copies, self._in_run = None, False
