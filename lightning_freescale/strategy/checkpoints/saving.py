"""The hooks that save checkpoints."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_freescale.embedding import table_optimizer
from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.runtime.log import logger
from lightning_freescale.runtime.streams import device_failure
from lightning_freescale.strategy.checkpoints import file, folder, random_states, storage
from lightning_freescale.strategy.checkpoints.device_copy import DeferredCopy
from lightning_freescale.strategy.checkpoints.folder import ENTRY, raise_together, run_together
from lightning_freescale.strategy.checkpoints.format import is_asynchronous, is_lightnings_io, writing_io
from lightning_freescale.strategy.checkpoints.meeting import AT_ONCE, MEETING_SECONDS, all_ranks_came
from lightning_freescale.strategy.checkpoints.shared_state import is_fitting, is_interrupted
from lightning_freescale.strategy.checkpoints.table_copies import TableCopies
from lightning_freescale.strategy.checkpoints.tensors import (
    gather_full,
    is_sharded,
    snapshot,
    with_values,
    without_shards,
)
from lightning_freescale.strategy.control import Control
from lightning_freescale.transport import failed_transfer

VERSION = 2  # Of the entries in ``checkpoint["freescale"]``.
INVALID_AFTER_TRANSFER = "the weights may be invalid, because a transfer has failed"


class CheckpointSaving(TableCopies):
    """Lightning's hooks that save checkpoints, as a part of the strategy class."""

    _reason_not_to_save: str | None = None
    _skip_barrier = False
    _came_to_save: bool | None = None  # Whether all ranks came to save after an exception; ``None`` before they meet.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights for a checkpoint: full tensors for a file, sharded ones for a folder. A collective."""
        module, control = self._module, self.control
        self._reason_not_to_save = None
        self._skip_barrier = False
        if not self._is_set_up:
            return module.state_dict()
        assert control is not None
        if self._copying or (self._format == "sharded" and self._saves_asynchronously):
            self.complete_copies()
            if not self._copies_late():
                self.complete_tables()
            control.check_ranks("a save")  # The thread of the save does the other checks before it writes.
        elif not is_interrupted(module.trainer):
            self._flush_and_check()
        elif (reason := self._flush_after_exception()) is not None:
            self._reason_not_to_save, self._skip_barrier = reason, True
            return {}
        state = module.state_dict()
        if self._format != "file" or self._copying:
            return state
        tables = {name: value for name, value in state.items() if is_sharded(value)}
        full = gather_full(tables, control, everywhere=self._hooks_read_the_state())
        return with_values(state, {name: full.get(name, value) for name, value in state.items()})

    @property
    def _saves_asynchronously(self) -> bool:
        """Whether a thread writes the checkpoint that is saved now."""
        return is_asynchronous(self.checkpoint_io) and is_fitting(self._module.trainer)

    def _flush_and_check(self) -> None:
        """Apply what is pending. Raise on every rank if the weights are invalid: a checkpoint must never hold them."""
        assert self.control is not None
        self.complete_tables()
        if self.root_device.type == "cuda":  # After this, all work that was queued behind a failed transfer has run.
            torch.cuda.synchronize(self.root_device)
        failure = failed_transfer()
        self.control.agree(failure, where=INVALID_AFTER_TRANSFER)
        self.control.check_losses()

    @property
    def _meeting_seconds(self) -> float:
        """How long the ranks wait for each other. With the wait before it, a rank ends within twice its timeout.

        If a rank is known to be missing, the others need not wait for it once more.
        """
        assert self.control is not None
        if self.control.misses_a_rank:
            return AT_ONCE
        return min(MEETING_SECONDS, self.control.timeout.total_seconds() / 2)

    def _all_ranks_came_to_save(self) -> bool:
        """Whether all ranks handle an exception and come to save. They meet once per run of the Trainer."""
        control = self.control
        assert control is not None
        if self._came_to_save is None:
            self._came_to_save = control.world_size == 1 or all_ranks_came(
                control.rank, control.world_size, self._meeting_seconds
            )
        return self._came_to_save

    @property
    def _handles_exception_alone(self) -> bool:
        """Whether an exception has ended the run, and not all ranks handle one. A collective would then wait for ranks."""
        return self._is_set_up and is_interrupted(self._module.trainer) and not self._all_ranks_came_to_save()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._handles_exception_alone:
            return decision
        if (decisions := self._gather_while_fitting(bool(decision))) is None:
            return super().reduce_boolean_decision(decision, all)
        return builtins.all(decisions) if all else any(decisions)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._handles_exception_alone:
            return obj
        gathered = self._gather_while_fitting(obj if self.global_rank == src else None)
        return super().broadcast(obj, src) if gathered is None else gathered[src]

    def _gather_while_fitting(self, value: Any) -> list[Any] | None:
        """``value`` of every rank; ``None`` unless ``fit`` is running.

        ``ModelCheckpoint`` asks before each save. DDP's answers travel through the GPU, which must end its queue first.
        """
        if not self._is_set_up or not is_fitting(self._module.trainer):
            return None
        assert self.control is not None
        return self.control.gather(value)

    def _flush_after_exception(self) -> str | None:
        """Prepare a save while an exception is handled. Return why it is not possible; the exception must not be hidden."""
        control = self.control
        assert control is not None
        if not self._all_ranks_came_to_save():
            return "an exception was raised on this rank, and not all ranks came to save"
        if control.diverged:
            return "the weights are invalid, because a loss was not finite"
        if control.failure is not None:
            return f"the weights are invalid, because a rank has failed in a step: {control.failure}"
        try:
            control.agree(device_failure(self.root_device), where="the device has failed")
            self._flush_and_check()
        except Exception as failure:
            return f"the weights cannot be completed: {failure}"
        return None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._reason_not_to_save is not None:
            logger.warning("no checkpoint was written to %s: %s", filepath, self._reason_not_to_save)
            return
        if not self._is_set_up:
            self._save_before_setup(checkpoint, filepath, storage_options)
            return
        control = self.control
        assert control is not None
        asynchronous = self._saves_asynchronously
        self._finish_before_save(control)
        path = os.fspath(filepath)
        if not asynchronous or self._format == "file":
            path = control.gather(path)[0]
        self._skip_barrier = asynchronous  # After it, the save would not be complete either.
        checkpoint = {**checkpoint, ENTRY: self._entry(checkpoint)}
        if self._format == "file":
            self._save_file(checkpoint, path, storage_options, asynchronous)
        elif storage_options is not None:
            raise TypeError(
                "storage_options go to a CheckpointIO, which writes one file; this checkpoint is a folder. Use "
                "FreeScaleStrategy(checkpoint='file') or leave them out"
            )
        else:
            self._save_folder(checkpoint, path, asynchronous)

    def _finish_before_save(self, control: Control) -> None:
        """Wait for the save before this one. If it failed because of a loss, all ranks raise the error of that loss."""
        try:
            self.finish_asynchronous_save()
        except CheckpointError:
            if not is_interrupted(self._module.trainer):
                control.check_losses()
            raise

    def _entry(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """What this package adds to a checkpoint, except tensors that may be sharded and what :meth:`_own_state` has."""
        entry: dict[str, Any] = {"version": VERSION, "tables": self._facts.table_names}
        if "optimizer_states" in checkpoint:
            entry["balance"] = self._balancer.state_dict()
        return entry

    def _own_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """What each rank adds to :meth:`_entry`. :func:`_of_all_ranks` puts it together."""
        if "optimizer_states" not in checkpoint:
            return {}
        middle = _in_the_middle_of_an_epoch(checkpoint)
        opened = [states.opened for states in self._loader_random_states] if middle else None
        current = random_states.capture(self.root_device)
        return {
            "steps": table_optimizer.steps_of(self._facts.kernels),
            "random": {"current": current, "opened": opened},
        }

    def _save_file(self, checkpoint: dict[str, Any], path: str, storage_options: Any, asynchronous: bool) -> None:
        assert self.control is not None
        checkpoint["state_dict"] = without_shards(checkpoint["state_dict"], self.control)
        checkpoint[ENTRY] |= _of_all_ranks(self.control.gather(self._own_state(checkpoint)))
        if "optimizer_states" in checkpoint:
            checkpoint[ENTRY]["table_optimizer"] = gather_full(self._optimizer_tensors(), self.control)
        error: Exception | None = None
        if self.control.rank == 0:
            state = checkpoint["state_dict"]
            on_host = {name: part.detach().cpu() if isinstance(part, Tensor) else part for name, part in state.items()}
            checkpoint["state_dict"] = with_values(state, on_host)
        # No rank whose waits were ended takes part. Its shards, which rank 0 has by now, would be invalid.
        self.control.agree(None)
        if self.control.rank == 0:
            io = writing_io(self.checkpoint_io)
            try:
                if asynchronous:
                    copied = snapshot(checkpoint)
                    self._background.start(lambda: file.write(io, copied, path, storage_options), path)
                else:
                    file.write(io, checkpoint, path, storage_options)
            except Exception as failure:
                if self.control.world_size == 1:
                    raise
                error = failure
        raise_together(self.control, error, where=f"saving {path}")

    def _save_folder(self, checkpoint: dict[str, Any], path: str, asynchronous: bool) -> None:
        assert self.control is not None
        sharded = {"state_dict": checkpoint.pop("state_dict")}
        if "optimizer_states" in checkpoint:
            sharded["table_optimizer"] = self._optimizer_tensors()
        save = folder.save if self._incremental is None else self._incremental.save
        if not asynchronous:
            checkpoint[ENTRY] |= _of_all_ranks(self.control.gather(self._own_state(checkpoint)))
            save(path, sharded, checkpoint, self.control)
            return
        control = self._background.control(self.control)
        copied = self._defer(sharded, checkpoint, control, where=f"saving {path}")
        # The thread asks for the path of rank 0, so that the training does not wait for other ranks.
        self._background.start(lambda: save(control.gather(path)[0], *copied(), control), path)

    def _defer(
        self, sharded: dict[str, Any], checkpoint: dict[str, Any], control: Control, where: str
    ) -> Callable[[], tuple[dict[str, Any], dict[str, Any]]]:
        """Copy the state, so that the training can go on.

        Returns:
            A function for the thread of the save. It brings the copy to host memory, and returns the tensors and, on rank 0,
            Lightning's entries. It is a collective of the ranks of ``control``.
        """
        assert self.control is not None
        meta = checkpoint if self.control.rank == 0 else {ENTRY: {}}
        beside = self._module.automatic_optimization and self._facts.change_in_backward_only
        copy = DeferredCopy((sharded, meta), self.root_device, beside)
        self._open_copies.append(copy)
        if not self._copies_late():
            copy.start()
        states, losses = self._own_state(checkpoint), self.control.losses_so_far()

        def checked() -> tuple[dict[str, Any], dict[str, Any]]:
            found = copy.on_host()
            # All work that was queued before the copy has run by now.
            if (failure := failed_transfer()) is not None:
                raise CheckpointError(f"{INVALID_AFTER_TRANSFER}: {failure}")
            if (error := losses()) is not None:
                raise error
            return found

        def copied() -> tuple[dict[str, Any], dict[str, Any]]:
            tensors, entries = run_together(control, checked, where)
            entries[ENTRY] |= _of_all_ranks(control.gather(states))
            return tensors, entries

        return copied

    def _save_before_setup(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Write the unsharded model as every other strategy does. Nothing in here waits for other ranks."""
        with suppress(RuntimeError):  # The module has no trainer before fit(), validate(), test() or predict().
            self._skip_barrier = is_interrupted(self._module.trainer)
        state = checkpoint["state_dict"]
        if any(is_sharded(value) or getattr(value, "is_meta", False) for value in state.values()):
            message = (
                f"{filepath}: the tables of the model are on the meta device or belong to another Trainer. Call fit(), "
                "validate(), test() or predict() first: they create the tables, and then the model can be saved"
            )
            if not self._skip_barrier:
                raise CheckpointError(message)
            logger.warning("no checkpoint was written to %s", message)
        elif self.is_global_zero:
            file.write(writing_io(self.checkpoint_io), checkpoint, os.fspath(filepath), storage_options)

    def barrier(self, name: str | None = None) -> None:
        if name == "Trainer.save_checkpoint" and self._skip_barrier:
            self._skip_barrier = False
            return
        super().barrier(name)

    def remove_checkpoint(self, filepath: Any) -> None:
        if not self.is_global_zero:
            return
        io, path = writing_io(self.checkpoint_io), os.fspath(filepath)

        def remove() -> None:
            io.remove_checkpoint(path)
            if is_lightnings_io(io) or storage.is_local(path):
                storage.remove(storage.previous_of(path))

        if self._background.busy:
            self._background.after_save(remove)  # A checkpoint is removed after the one that replaces it is complete.
        else:
            remove()

    def close_saves(self) -> None:
        """Wait for an asynchronous save without other ranks. A failure is logged."""
        if self._saves is not None and (error := self._saves.close()) is not None:
            logger.error("an asynchronous save failed: %s", error)


def _of_all_ranks(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of a checkpoint from the states that the ranks have gathered."""
    if not states[0]:
        return {}
    steps = table_optimizer.steps_of_all_ranks([state["steps"] for state in states])
    return {"table_optimizer_steps": steps, "random": [state["random"] for state in states]}


def _in_the_middle_of_an_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Whether the training resumes from ``checkpoint`` in the middle of an epoch."""
    loop = checkpoint["loops"]["fit_loop"]
    loaders = loop["state_dict"].get("combined_loader", [])
    if loaders and all("batches" in state for state in loaders):
        return any(state["batches"] for state in loaders)
    progress = loop["epoch_loop.batch_progress"]
    return bool(progress["current"]["processed"]) and not progress["is_last_batch"]
