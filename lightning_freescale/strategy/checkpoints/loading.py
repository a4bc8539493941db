"""The hooks that load checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lightning_freescale.embedding import table_optimizer
from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.runtime.lightning_compat import FITTING
from lightning_freescale.runtime.log import log_once
from lightning_freescale.strategy.checkpoints import file, folder, random_states, storage
from lightning_freescale.strategy.checkpoints.folder import ENTRY, raise_together
from lightning_freescale.strategy.checkpoints.format import choose_format, is_lightnings_io, writing_io
from lightning_freescale.strategy.checkpoints.incremental import Incremental, IncrementalSaves
from lightning_freescale.strategy.checkpoints.random_states import LoaderRandomStates
from lightning_freescale.strategy.checkpoints.shared_state import CheckpointState
from lightning_freescale.strategy.checkpoints.tensors import fill_shards, shape_of, table_names, with_values
from lightning_freescale.strategy.checkpoints.weights import PendingWeights, optimizer_states_without_tables

LOADING = "loading a checkpoint"


class CheckpointLoading(CheckpointState):
    """Lightning's hooks that load checkpoints, as a part of the strategy class.

    Weights are restored before the model is sharded, as with DDP, so that the hooks of the user's module and callbacks run
    in the usual order. What only a sharded model can take waits for :meth:`after_sharding`.
    """

    _table_positions: list[list[list[int]]]  # For each optimizer and group, where the user's tables were.
    _pending_weights: PendingWeights | None = None
    _loaded: tuple[str, dict[str, tuple[int, ...]]] = ("", {})  # Path and folder tables of the checkpoint read last.
    _resumed_random: dict[str, Any] | None = None
    _plain_random: LoaderRandomStates | None = None  # For loaders that the pipeline does not wrap.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self.control is None:  # Before the set-up there are no ranks to agree with.
            return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        self.finish_saves()
        path, in_folder = self._find(os.fspath(self.broadcast(checkpoint_path)))
        checkpoint: dict[str, Any] = {}
        tables: dict[str, tuple[int, ...]] = {}
        error: Exception | None = None
        try:
            if in_folder:
                checkpoint, tables = self._read_folder(path, weights_only)
            else:
                checkpoint = file.read(writing_io(self.checkpoint_io), path, weights_only)
        except Exception as failure:
            error = failure
        raise_together(self.control, error, where=LOADING)
        self._loaded = (path, tables)
        if self._module.trainer.state.fn == FITTING:
            saved = checkpoint.get(ENTRY, {}).get("random")
            self._resumed_random = random_states.states_of_rank(saved, self.control.rank, self.control.world_size)
        return checkpoint

    def _find(self, path: str) -> tuple[str, bool]:
        """Where the checkpoint ``path`` lies, and whether it is a folder. Raises if it is damaged. A collective."""
        assert self.control is not None
        in_folder, readable = False, True
        error: Exception | None = None
        try:
            if is_lightnings_io(writing_io(self.checkpoint_io)):
                path = storage.find(path)
            else:
                with suppress(ValueError):  # Another CheckpointIO may use addresses of its own.
                    readable = False
                    readable = storage.exists(path)
            in_folder = readable and storage.is_folder(path)
        except Exception as failure:
            error = failure
        raise_together(self.control, error, where=LOADING)
        if readable:
            (folder.verify if in_folder else file.verify)(path, self.control)
        return path, in_folder

    def _read_folder(self, path: str, weights_only: bool | None) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        """The checkpoint without the tables, and the shapes of the tables."""
        meta = folder.load_meta(path, weights_only)
        stored = folder.stored_shapes(path)
        names = meta[ENTRY].get("tables") or table_names(self._module)
        tables = {name: stored[name] for name in names if name in stored}
        weights = folder.read_unsharded(path, "state_dict", leave_out=tables)
        # In a copy in host memory, the weights that are not in tables are in meta.pt, so that every host has all of them.
        weights |= meta.pop("state_dict", {})
        return {**meta, "state_dict": folder.FolderStateDict(weights, tables, path)}, tables

    # ---- weights ---------------------------------------------------------------------------------------------------
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        path, tables = self._loaded
        state = checkpoint["state_dict"]
        if self.control is None:
            self._module.load_state_dict(state, strict=strict)
            return
        weights = PendingWeights(path, with_values(state, state), tables, strict)
        module = self._module
        unsharded = getattr(module, "_freescale", None) is None
        if unsharded and (tables or any(parameter.is_meta for parameter in module.parameters())):
            self._pending_weights = weights
        else:
            self.before_tables_are_read()
            weights.load(module, self.control)

    def before_tables_are_read(self) -> None:
        """The model is sharded, and the tables of a checkpoint are about to be read. A collective."""

    def after_sharding(self) -> None:
        """Choose the format of checkpoints, and load the weights that only a sharded model can take. A collective."""
        assert self.control is not None
        weights = self._module.state_dict().values()
        self._format = choose_format(self._checkpoint_format, self.checkpoint_io, weights, self.control.world_size)
        option = self._checkpoint_format
        self._incremental = IncrementalSaves(option) if isinstance(option, Incremental) else None
        self.control.diverged = False
        pending, self._pending_weights = self._pending_weights, None
        if pending is not None:
            self.before_tables_are_read()
            pending.load(self._module, self.control)

    # ---- optimizers ------------------------------------------------------------------------------------------------
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        entry = checkpoint.get(ENTRY)
        states = checkpoint["optimizer_states"]
        if entry is None:
            states = optimizer_states_without_tables(list(states), self._table_positions)
        try:
            super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
        except (ValueError, KeyError, RuntimeError) as failure:
            raise CheckpointError(
                f"{self._loaded[0]}: the optimizers of the checkpoint are not those of the model: {failure}. To start from "
                "its weights alone, call model.load_state_dict(torch.load(PATH)['state_dict']) and pass no ckpt_path"
            ) from failure
        if entry is not None:
            self._load_table_optimizer(entry)
        elif self._sharded_model is not None and self._sharded_model.has_tables:
            log_once(
                f"{self._loaded[0]} was written by another strategy: weights, dense optimizers, schedulers and loops resume, "
                "but the state of the tables' optimizer starts anew, and so do random numbers"
            )

    def _load_table_optimizer(self, entry: Mapping[str, Any]) -> None:
        assert self.control is not None
        path = self._loaded[0]
        own = self._optimizer_tensors()
        in_file = entry.get("table_optimizer")
        error: Exception | None = None
        try:
            shapes = (
                folder.stored_shapes(path, "table_optimizer")
                if in_file is None
                else {name: tuple(value.shape) for name, value in in_file.items()}
            )
            for name, value in own.items():
                if shapes.get(name) != shape_of(value):
                    raise CheckpointError(
                        f"{path} holds no state of {name} with shape {list(shape_of(value))}: it was saved with another "
                        "embedding_optimizer. Use the same one, or load the weights alone"
                    )
        except Exception as failure:
            error = failure
        raise_together(self.control, error, where=LOADING)
        if in_file is None:
            folder.load_sharded(path, {"table_optimizer": own}, self.control)
        else:
            for name, value in own.items():
                fill_shards(value, in_file[name])
        table_optimizer.set_steps(self._module, entry["table_optimizer_steps"])
        self._balancer.load_state_dict(entry.get("balance"))

    def forget_loaded(self) -> None:
        """A run has ended. What it has read and not used must not reach the next one."""
        self._pending_weights = self._resumed_random = self._plain_random = None

    # ---- random states ---------------------------------------------------------------------------------------------
    def random_states_of_loader(self, index: int) -> LoaderRandomStates:
        """The random states of the train loader number ``index``, at the moment when it is created."""
        return random_states.of_loader(self._resumed_random, index, self.root_device)

    def before_loaders_restart(self) -> None:
        """Lightning may open train loaders of unknown length again, after this call."""
        for states in self._loader_random_states:
            states.before_reopen()

    def restore_random_states(self) -> None:
        """Continue the random numbers of the checkpoint, or prepare the loaders for it. The training is about to start."""
        for states in self._loader_random_states:
            states.before_training()
        self._resumed_random = None

    def before_plain_loader_opens(self) -> None:
        """Lightning is about to open a train loader that the pipeline does not wrap."""
        if self._resumed_random is not None and self._plain_random is None and self._module.trainer.training:
            self._plain_random = self.random_states_of_loader(0)
            self._plain_random.before_open()

    def before_training_batch(self) -> None:
        """A batch of a loader that the pipeline does not wrap is about to be trained."""
        if self._plain_random is not None:
            self._plain_random.before_batch()
            self._plain_random = None
