"""``BatchPipeline``: takes batches from the user's loaders to the training step, and knows which batch is in training.

A batch goes through these stages::

    loader -> balance (samples move between ranks) -> prefetch -> prepare (check, copy) -> receive -> training step

Everything that belongs to a batch travels with it as a ``PreparedBatch``, until ``receive`` unpacks it.
"""

from __future__ import annotations

import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_freescale.balance.balancer import Balancer
from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.exchange import ExchangeLoader
from lightning_freescale.balance.sampler import GlobalBatchSampler
from lightning_freescale.batch.checks import check_batch
from lightning_freescale.batch.contents import find_parts
from lightning_freescale.bubbles.timeline import Timeline
from lightning_freescale.embedding import announced_ids, owner_counts
from lightning_freescale.embedding.call_agreement import AGREED_STEPS
from lightning_freescale.runtime import lightning_compat as compat
from lightning_freescale.runtime.errors import ConfigurationError
from lightning_freescale.runtime.log import log_once
from lightning_freescale.runtime.streams import SideStream
from lightning_freescale.strategy.checkpoints.random_states import LoaderRandomStates
from lightning_freescale.strategy.control import Control, Request
from lightning_freescale.strategy.loss_weighting import REDUCTIONS, loss_weight, share
from lightning_freescale.strategy.prefetch import PrefetchLoader, Prepared
from lightning_freescale.strategy.prepared_batch import (
    COPIED_TYPES,
    PreparedBatch,
    copy_in_advance,
    features_of,
    prepared_batches,
    start_copy,
    unpack,
)
from lightning_freescale.strategy.refusals import (
    refuse_another_number_of_ranks,
    refuse_to_move_coupled_samples,
)


class BatchPipeline:
    """The batches of one strategy, from the loaders to the step.

    Args:
        balancer: assigns the samples of train loaders to ranks.
        timeline: records the waits for batches and the copies to the device.
        is_overridden: ``is_overridden(name, instance)`` of the user's Lightning namespace.
        loss_reduction: what the loss is a mean over, unless the model says so itself.
        uneven: what happens when the train data of some ranks end before those of others.
        on_request: called when a rank asked all ranks to stop or to requeue.
        random_states: returns the random states of the train loader with a given number.
    """

    def __init__(
        self,
        balancer: Balancer,
        timeline: Timeline,
        *,
        is_overridden: Callable[[str, object], bool],
        loss_reduction: str,
        uneven: Literal["error", "stop", "continue"],
        on_request: Callable[[Request], None],
        random_states: Callable[[int], LoaderRandomStates],
    ):
        self._balancer, self._timeline, self._is_overridden = balancer, timeline, is_overridden
        self._loss_reduction, self._uneven, self._on_request = loss_reduction, uneven, on_request
        self._random_states = random_states
        self._rows: Mapping[str, int] = {}
        self.balances = True  # Whether samples may move between ranks. The strategy sets it.
        self.has_new_ids = False  # Whether all ranks know that this batch is not the one that was announced.
        self.train_loaders: list[PrefetchLoader] = []
        self.current: list[PreparedBatch] = []  # The batches in training, one for each train loader.
        self._received: Any = None  # The same batches, in the nesting in which Lightning combines them.
        self._next: PreparedBatch | None = None  # The batch of the next step, if there is one train loader.
        self._handed_out: dict[int, deque[PreparedBatch]] = defaultdict(deque)  # By train loader, without wrapping.
        self._predicting: PrefetchLoader | None = None
        self._predicted = 0  # Loaders of this prediction that are done on all ranks.

    def open(self, trainer: Any, control: Control, copies: SideStream, device: torch.device) -> None:
        """Set what is known only after the processes have met."""
        self._trainer, self._control, self._copies, self._device = trainer, control, copies, device
        self._known_hooks: dict[str, bool] = {}  # The answers of _has_hook, which every batch asks for.
        self._known_steps: dict[str, bool] = {}  # The answers of _step_fetches_batches.
        self._replaces_ids, self._transferred = False, 0  # Whether on_after_batch_transfer replaces ids; its calls.

    @property
    def rows(self) -> Mapping[str, int]:
        """Rows of the table of each feature. The strategy sets them, equal on all ranks."""
        return self._rows

    @rows.setter
    def rows(self, rows: Mapping[str, int]) -> None:
        self._rows = rows
        self._control.num_numbers = announced_ids.numbers_per_rank(rows)

    # ---- loaders ---------------------------------------------------------------------------------------------------
    def wrap(self, loader: Any) -> PrefetchLoader:
        """The loader to use in place of the user's ``loader``. A collective."""
        trainer = self._trainer
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, GlobalBatchSampler):
            refuse_another_number_of_ranks(sampler, trainer.world_size)
        if trainer.training:
            return self._wrap_train_loader(loader)
        return PrefetchLoader(
            loader,
            prepare=self._prepare,
            control=self._control,
            limit=lambda wrapped: compat.batch_limit(trainer, wrapped),
            on_request=self._on_request,
            on_iter=self._join_others if trainer.predicting else lambda wrapped: None,
            uneven="join" if trainer.predicting else "error",
            hand_out=self._unwrapped if self._hands_out_plain_batches() else lambda batch: batch,
            waits_on_host=self._waits_on_host,
        )

    def _wrap_train_loader(self, loader: Any) -> PrefetchLoader:
        trainer = self._trainer
        known = [] if trainer.train_dataloader is None else torch.utils._pytree.tree_leaves(trainer.train_dataloader)
        if any(wrapped is old for wrapped in known for old in self.train_loaders):
            self._balancer.detach()  # reload_dataloaders_every_n_epochs replaces the loaders.
            self.train_loaders.clear()
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, GlobalBatchSampler):
            refuse_to_move_coupled_samples(trainer.lightning_module, sampler.planner, "data module")
        balanced = loader
        if self.balances:
            balanced = self._balancer.attach(
                loader,
                cost_model=self._cost_model(),
                check=lambda batch: check_batch(batch, self.rows),
                pin_memory=self._device.type == "cuda",
            )
        wrapped = PrefetchLoader(
            balanced,
            prepare=lambda batch: self._prepare(
                batch, checked=isinstance(balanced, ExchangeLoader) and balanced.checked
            ),
            control=self._control,
            limit=lambda wrapped: trainer.num_training_batches,
            on_request=self._on_request,
            uneven=self._uneven,
            hand_out=self._unwrapped if self._hands_out_plain_batches() else lambda batch: batch,
            is_processed=lambda: compat.current_batch_is_processed(trainer),
            random_states=self._random_states(len(self.train_loaders)),
            timeline=self._timeline,
            # Batches that were exchanged are checked where they are loaded.
            waits_on_host=lambda: not isinstance(balanced, ExchangeLoader) and self._waits_on_host(),
        )
        self.train_loaders.append(wrapped)
        return wrapped

    def _cost_model(self) -> CostModel | None:
        """The cost of a sample, if the model has a method ``cost_coefficients``."""
        module = self._trainer.lightning_module
        if not hasattr(module, "cost_coefficients"):
            return None
        return CostModel.of_module(module)

    # ---- preparation -----------------------------------------------------------------------------------------------
    def _prepare(self, batch: Any, checked: bool = False) -> Prepared:
        """Check a batch that was just fetched, weigh it, and start its copy to the device."""
        if not checked:
            check_batch(batch, self.rows)
        weight = loss_weight(batch, self.reduction(), self._trainer.lightning_module)
        sums = self._balancer.sums(batch)
        if self._hands_out_plain_batches() or self._has_hook("transfer_batch_to_device"):
            return Prepared(batch, weight, cost_sums=sums)  # The user's code moves the batch.
        batch = self._trainer.precision_plugin.convert_input(batch)

        def move() -> Any:
            on_cuda = self._device.type == "cuda"
            if isinstance(batch, COPIED_TYPES):  # There is nothing else to be found in the batch.
                return batch.to(self._device, non_blocking=on_cuda)
            return move_data_to_device(start_copy(batch, self._device) if on_cuda else batch, self._device)

        with self._timeline.span("h2d", stream=self._copies.stream):
            moved, copied = copy_in_advance(move, self._copies)
        features, numbers = list(find_parts(moved, KeyedJaggedTensor)) if self.rows else [], None
        if self.rows and self._copies_ids():
            for host, copy in zip(find_parts(batch, KeyedJaggedTensor), features, strict=True):
                owner_counts.attach(host, copy, self.rows, self._control.world_size)
            numbers = announced_ids.to_announce(features, self.rows, self._control.world_size)
        return Prepared(moved, weight, features, moved=True, copied=copied, cost_sums=sums, numbers=numbers)

    def _waits_on_host(self) -> bool:
        """Whether a batch stays in host memory until its step."""
        return (
            self._device.type != "cuda" or self._hands_out_plain_batches() or self._has_hook("transfer_batch_to_device")
        )

    def _copies_ids(self) -> bool:
        """Whether user code cannot change the ids of a batch that is not yet in training, because they are a copy."""
        return self._device.type == "cuda"

    def _hands_out_plain_batches(self) -> bool:
        """Whether user code sees the batch before the strategy does, so that it must not be wrapped."""
        return self._has_hook("on_before_batch_transfer") or self._step_fetches_batches()

    def _step_fetches_batches(self) -> bool:
        """Whether the step method of the current stage takes ``dataloader_iter`` in place of a batch."""
        stage = str(self._trainer.state.stage)
        if stage not in self._known_steps:
            self._known_steps[stage] = compat.takes_dataloader_iter(self._trainer)
        return self._known_steps[stage]

    def _unwrapped(self, batch: PreparedBatch) -> Any:
        if self._step_fetches_batches():
            self._use([batch])
        elif self._trainer.training:
            self._handed_out[id(batch.loader)].append(batch)
        return batch.batch

    def _has_hook(self, name: str) -> bool:
        """Whether the user's module or data module overrides the transfer hook ``name``."""
        if name not in self._known_hooks:
            self._known_hooks[name] = self._is_overridden(name, compat.transfer_hook_owner(self._trainer, name))
        return self._known_hooks[name]

    # ---- the batch in training -------------------------------------------------------------------------------------
    def receive(self, batch: Any, dataloader_idx: int, transfer: Callable[[Any], Any], training: bool) -> Any:
        """Unpack the batch that Lightning is about to use.

        Args:
            batch: a :class:`PreparedBatch`, a nesting of them, or a plain batch.
            dataloader_idx: index of the loader in evaluation.
            transfer: moves a batch to the device as Lightning does, with the user's hooks.
            training: whether the batch is for the training, and not for an evaluation.
        """
        self._control.check_ranks("a batch")
        self.has_new_ids = False
        prepared = prepared_batches(batch)
        if not prepared:
            if training:
                self._use([queue.popleft() for queue in self._handed_out.values() if queue])
                self._received = None
            return transfer(batch)
        self._received = batch
        if training:
            self._use(prepared)
        contents = unpack(batch)
        if not all(part.moved for part in prepared):
            self._received = None
            return transfer(contents)
        if self._has_hook("on_after_batch_transfer"):
            return self._call_after_transfer(contents, dataloader_idx, training)
        return contents

    def _call_after_transfer(self, batch: Any, dataloader_idx: int, training: bool) -> Any:
        owner = compat.transfer_hook_owner(self._trainer, "on_after_batch_transfer")
        changed = owner.on_after_batch_transfer(batch, dataloader_idx)
        if training and self.rows:
            if not self._replaces_ids:
                self._replaces_ids = self._agree_on_replaced(_features(changed) != _features(batch))
            if self._replaces_ids:
                # The next batches will be replaced as well, so their rows cannot be requested in advance.
                self._received = None
                log_once("prioritize: on_after_batch_transfer replaces the ids of the batch, so no rows are prefetched")
        return changed

    def _agree_on_replaced(self, replaced: bool) -> bool:
        """Whether the hook has replaced the ids of this batch on any rank; after the first batches, on this one."""
        self._transferred += 1
        if self._transferred > AGREED_STEPS:
            return replaced
        self.has_new_ids = any(self._control.gather(replaced, what="the ids after on_after_batch_transfer"))
        return self.has_new_ids

    def _use(self, batches: list[PreparedBatch]) -> None:
        self.current, self._next = batches, None
        for batch in batches:
            if batch.loader is not None:
                batch.loader.use(batch)

    def features_ahead(self) -> tuple[list[KeyedJaggedTensor], list[KeyedJaggedTensor]]:
        """The jagged tensors of the next two batches. A list is empty if that batch is not known."""
        following: list[PreparedBatch | None] = []
        after_next: list[PreparedBatch | None] = []
        with self._timeline.span("id_exchange"):  # Waits for the header of the slowest rank.
            for part in prepared_batches(self._received):
                follower = part.follower()
                following.append(follower)
                after_next.append(None if follower is None else follower.follower())
            self._note_announced([*following, *after_next])
        self._next = following[0] if len(following) == 1 else None
        return features_of(following), features_of(after_next)

    def next_batch(self) -> Any:
        """The batch of the next step, safe to use on the current stream.

        ``None`` if it is not known, or if a hook of the user may replace it. It is known after :meth:`features_ahead`. User
        code may still change its fields before its step.
        """
        if self._next is None or not self._next.moved or self._has_hook("on_after_batch_transfer"):
            return None
        return self._next.use()

    def _note_announced(self, batches: list[PreparedBatch | None]) -> None:
        """Keep what the headers say about the ids of ``batches`` with their jagged tensors."""
        for batch in batches:
            if batch is not None and batch.pending is not None and not batch.announced:
                announced_ids.note(batch.features, self.rows, batch.pending.numbers())
                batch.announced = True

    @property
    def index(self) -> int:
        """Batches of this epoch up to the current one."""
        return self.current[0].index + 1 if self.current else 0

    @property
    def cost_sums(self) -> Any:
        """Sums of the current batch for the cost model; ``None`` if several loaders are combined."""
        return self.current[0].cost_sums if len(self.current) == 1 else None

    # ---- loss weights ----------------------------------------------------------------------------------------------
    def loss_weights(self) -> list[int]:
        """Samples or tokens of the current batch on each rank, ``[ranks]``; empty if they are not known."""
        if len(self.current) == 1:
            return self.current[0].weights
        weights = [batch.weights for batch in self.current]
        if not weights:
            return []
        shares = {tuple(share(part, rank) for rank in range(len(part))) for part in weights}
        if len(shares) > 1:
            log_once(
                "several train loaders: the ranks hold different shares of their batches. The loss is weighted by the "
                "samples of all loaders together, which is exact only if the loss is one mean over all of them"
            )
        return weights[0] if len(shares) == 1 else [sum(part) for part in zip(*weights, strict=True)]

    def reduction(self) -> str:
        """What the loss is a mean over: the model's attribute ``loss_reduction``, or the strategy's option."""
        reduction = getattr(self._trainer.lightning_module, "loss_reduction", None) or self._loss_reduction
        if reduction not in REDUCTIONS:
            raise ConfigurationError(f"loss_reduction={reduction!r} is unknown; choose one of {', '.join(REDUCTIONS)}")
        return reduction

    # ---- the end ---------------------------------------------------------------------------------------------------
    def _join_others(self, loader: PrefetchLoader | None) -> None:
        """Take part in the prediction steps of other ranks that have more batches of the last loader."""
        last, self._predicting = self._predicting, loader
        if last is not None and last is not loader:
            last.join_others(partial(self._predict, self._predicted))
            self._predicted += 1

    def _predict(self, dataloader_idx: int, batch: PreparedBatch) -> None:
        """Run the prediction step on ``batch`` and drop its output."""
        strategy, module = self._trainer.strategy, self._trainer.lightning_module
        arguments = (strategy.batch_to_device(batch, dataloader_idx=dataloader_idx), batch.index, dataloader_idx)
        strategy.predict_step(*arguments[: len(inspect.signature(module.predict_step).parameters)])

    def end_predictions(self) -> None:
        """Return when all ranks have predicted all of their batches."""
        self._join_others(None)
        self._predicted = 0

    def close(self) -> None:
        """Forget the loaders and batches of this run."""
        self.train_loaders.clear()
        self.current, self._received, self._predicting, self._next = [], None, None, None
        self._handed_out.clear()


def _features(batch: Any) -> list[int]:
    """The identities of the jagged tensors in a batch."""
    return [id(part) for part in find_parts(batch, KeyedJaggedTensor)]
