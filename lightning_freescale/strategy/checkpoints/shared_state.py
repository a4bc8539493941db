"""What the hooks that save and load checkpoints share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_freescale.balance.balancer import Balancer
from lightning_freescale.embedding import table_optimizer
from lightning_freescale.embedding.exchange_mode import ExchangeMode
from lightning_freescale.embedding.zero_collision.sharded import ShardedZeroCollisionCollection
from lightning_freescale.runtime.lightning_compat import FITTING
from lightning_freescale.strategy.checkpoints.background import BackgroundSaves
from lightning_freescale.strategy.checkpoints.device_copy import DeferredCopy
from lightning_freescale.strategy.checkpoints.format import is_asynchronous
from lightning_freescale.strategy.checkpoints.incremental import Incremental, IncrementalSaves
from lightning_freescale.strategy.checkpoints.random_states import LoaderRandomStates
from lightning_freescale.strategy.checkpoints.tensors import table_names
from lightning_freescale.strategy.control import Control
from lightning_freescale.strategy.pipeline import BatchPipeline
from lightning_freescale.strategy.sharded_model import ShardedModel

if TYPE_CHECKING:  # The hooks are mixed into the DDPStrategy of either Lightning namespace.
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class ModelFacts(NamedTuple):
    """What each save needs to know about a sharded model, and what stays the same in all of them."""

    model: ShardedModel | None
    table_names: list[str]
    kernels: list[tuple[str, Any]]  # Of the tables on this rank, each with the name of its collection.
    change_in_backward_only: bool  # Whether nothing but a backward pass changes the tables during a training.

    @classmethod
    def of(cls, module: Any, model: ShardedModel | None) -> ModelFacts:
        kernels = list(table_optimizer.kernels_by_collection(module))
        # A zero-collision table gives rows to new ids in the forward pass.
        new_ids = any(isinstance(part, ShardedZeroCollisionCollection) for part in module.modules())
        only = not new_ids and table_optimizer.updates_in_backward_only(kernels)
        return cls(model, sorted(table_names(module)), kernels, only)


class CheckpointState(_Base):
    """Attributes of the strategy that checkpoints are about, and the state of saves and loads."""

    control: Control | None
    _sharded_model: ShardedModel | None
    _balancer: Balancer
    _exchange_mode: ExchangeMode
    _pipeline: BatchPipeline
    _checkpoint_format: str | Incremental  # The strategy's option: "auto", "file", "sharded" or ``Incremental``.
    _incremental: IncrementalSaves | None = None
    _format: str | None = None  # The format chosen for the model: "file" or "sharded".
    _saves: BackgroundSaves | None = None
    _known_facts: ModelFacts | None = None
    _open_copies: list[DeferredCopy]  # Copies of the tables that may not be complete. The tables must not change.
    _copying = False  # Whether the present save is a copy in host memory, which has the form of a folder.

    @property
    def _module(self) -> Any:
        """The user's LightningModule. The strategy implements it."""
        raise NotImplementedError

    def complete_tables(self) -> None:
        """Apply every pending gradient of the tables. The strategy implements it."""
        raise NotImplementedError

    def complete_copies(self) -> None:
        """Make the copies of tables that saves in the background wait for. ``CheckpointSaving`` implements it."""
        raise NotImplementedError

    @property
    def _is_set_up(self) -> bool:
        """Whether this strategy has sharded the model, or taken over a sharded one."""
        record = getattr(self._module, "_freescale", None)
        return self.control is not None and record is not None and record is self._sharded_model

    @property
    def _background(self) -> BackgroundSaves:
        if self._saves is None:
            self._saves = BackgroundSaves()
        return self._saves

    @property
    def _loader_random_states(self) -> list[LoaderRandomStates]:
        """The random states of the train loaders that the pipeline wraps."""
        return [part.random_states for part in self._pipeline.train_loaders if part.random_states is not None]

    def _optimizer_tensors(self) -> dict[str, Any]:
        """The sharded state of the tables' optimizer, by name."""
        sharded = None if self._sharded_model is None else self._sharded_model.sharded
        return {} if sharded is None else table_optimizer.optimizer_tensors(sharded)

    @property
    def saves_in_background(self) -> bool:
        """Whether an asynchronous save or a copy in host memory is being written on this rank."""
        return self._saves is not None and self._saves.writing

    def finish_saves(self) -> None:
        """Wait for saves in the background, and raise on all ranks if one failed. All ranks must call it."""
        self.finish_asynchronous_save()

    def finish_asynchronous_save(self) -> None:
        """Wait for an asynchronous save of a checkpoint, and raise on all ranks if it failed. All ranks must call it."""
        if is_asynchronous(self.checkpoint_io):
            self.complete_copies()
            self._background.finish(self.control if self._format == "file" else None)  # Rank 0 alone writes a file.

    @property
    def _facts(self) -> ModelFacts:
        if self._known_facts is None or self._known_facts.model is not self._sharded_model:
            self._known_facts = ModelFacts.of(self._module, self._sharded_model)
        return self._known_facts


def is_interrupted(trainer: Any) -> bool:
    """Whether an exception has ended ``fit``, ``validate``, ``test`` or ``predict``, perhaps on this rank alone."""
    return trainer.state.status == "interrupted"


def is_fitting(trainer: Any) -> bool:
    """Whether ``fit`` is running, and no exception has ended it."""
    return trainer.state.fn == FITTING and trainer.state.status == "running"
