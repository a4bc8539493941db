"""When copies in host memory are made, chosen for a resume, loaded and removed."""

from __future__ import annotations

import os
from typing import Any

from lightning_freescale.runtime import lightning_compat as compat
from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.runtime.log import log_once, logger
from lightning_freescale.strategy.checkpoints import file, folder, storage
from lightning_freescale.strategy.checkpoints.background import BackgroundSaves
from lightning_freescale.strategy.checkpoints.folder import ENTRY, run_together
from lightning_freescale.strategy.checkpoints.format import writing_io
from lightning_freescale.strategy.checkpoints.host_copies import finding, writing
from lightning_freescale.strategy.checkpoints.host_copies.finding import FoundCopy
from lightning_freescale.strategy.checkpoints.host_copies.host_folder import HostFolder
from lightning_freescale.strategy.checkpoints.host_copies.hosts import Hosts
from lightning_freescale.strategy.checkpoints.host_copies.options import HostCopies
from lightning_freescale.strategy.checkpoints.loading import CheckpointLoading
from lightning_freescale.strategy.checkpoints.saving import CheckpointSaving
from lightning_freescale.strategy.checkpoints.shared_state import is_interrupted
from lightning_freescale.strategy.checkpoints.tensors import is_sharded

LAST_COPY_SECONDS = 1.0  # How long a training that has failed waits for a copy. Other ranks may have ended.


class HostCopyHooks(CheckpointSaving, CheckpointLoading):
    """Lightning's hooks around copies in host memory, as a part of the strategy class. Without the option they do nothing."""

    _host_copies: HostCopies | None = None  # The strategy's option.
    _copy_place: HostFolder | None = None  # The folder of this host, during a run that makes copies.
    _copy_hosts: Hosts
    _copy_saves: BackgroundSaves
    _copy_callback: Any = None
    _last_copied = 0  # The step of the last copy, or the one from which the training has resumed.
    _found_copy: FoundCopy | None = None  # The copy from which this run resumes.
    _reads_copy = False

    def open_host_copies(self, trainer: Any) -> None:
        """Prepare a run that makes copies, and let it resume from one. A collective."""
        options, control = self._host_copies, self.control
        if options is None or trainer.state.fn != compat.FITTING or trainer.fast_dev_run:
            return
        assert control is not None
        place = HostFolder(options.folder, options.name_of_run())
        identity = run_together(control, place.open, "copies in host memory")
        self._copy_hosts = Hosts(control.gather(identity), control.rank)
        self._copy_place, self._copy_saves, self._last_copied = place, BackgroundSaves(), 0
        compat.choose_checkpoint(trainer, self._choose_checkpoint)
        self._copy_callback = compat.add_callback(trainer, on_train_batch_end=self._copy_if_due)

    # ---- make --------------------------------------------------------------------------------------------------------
    def _copy_if_due(self, trainer: Any, *batch: Any) -> None:
        assert self._host_copies is not None
        step, every = trainer.global_step, self._host_copies.every_n_steps
        if step % every == 0 and step > self._last_copied:  # The step stays equal while gradients are accumulated.
            self._last_copied = step
            self.keep_copy(trainer)

    def keep_copy(self, trainer: Any) -> None:
        """Start to write a copy of the present state, unless the one before it is still being written. A collective."""
        control, place = self.control, self._copy_place
        assert control is not None
        assert place is not None
        if any(control.gather(self._copy_saves.writing)):
            log_once(
                "copies in host memory: one was left out, because the one before it was not complete. Set a larger every_n_steps"
            )
            return
        self._copy_saves.finish()
        self._copying = True
        try:
            trainer.save_checkpoint(place.of_step(trainer.global_step), weights_only=False)
        finally:
            self._copying = False

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not self._copying:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        control, place = self.control, self._copy_place
        assert control is not None
        assert place is not None
        weights = checkpoint["state_dict"]
        tables = {name: value for name, value in weights.items() if is_sharded(value)}
        others = {name: value for name, value in weights.items() if name not in tables}
        sharded = {"state_dict": tables, "table_optimizer": self._optimizer_tensors()}
        meta = {**checkpoint, "state_dict": others, ENTRY: self._entry(checkpoint)}
        step, in_thread = checkpoint["global_step"], self._copy_saves.control(control)
        copied = self._defer(sharded, meta, in_thread, where=f"copying step {step} to {place.path}")
        self._copy_saves.start(
            lambda: writing.write(place, step, *copied(), hosts=self._copy_hosts, control=in_thread),
            place.of_step(step),
        )
        self._skip_barrier = True

    @property
    def saves_in_background(self) -> bool:
        return super().saves_in_background or (self._copy_place is not None and self._copy_saves.writing)

    def finish_saves(self) -> None:
        super().finish_saves()
        if self._copy_place is not None:
            self.complete_copies()
            self._copy_saves.finish()

    # ---- choose ------------------------------------------------------------------------------------------------------
    def _choose_checkpoint(self, path: Any, weights_only: bool | None) -> Any:
        """The path from which the training resumes: the newest copy if it is newer than ``path``. A collective."""
        control, place, hosts = self.control, self._copy_place, self._copy_hosts
        if place is None or control is None:
            return path
        path = control.gather(None if path is None else os.fspath(path))[0]
        copy = finding.newest(place, hosts, control)
        reads = control.rank == 0 and copy is not None and path is not None
        step = control.gather(self._step_of(path, weights_only) if reads else None)[0]
        if copy is None:
            done = self._module.trainer.global_step  # A second fit of the same Trainer goes on.
            start = f"The training goes on from step {done}" if done else "The training starts anew"
            then = f"The training resumes from {path}" if path else start
            log_once(f"copies in host memory: no complete one of this training is in {place.path}. {then}")
            return path
        if path is not None and (step is None or step >= copy.step):
            reason = "cannot be read" if step is None else f"has step {step}, so the training resumes from it"
            log_once(f"copies in host memory: the newest has step {copy.step}. {path} {reason}")
            return path
        than = "there is no checkpoint" if path is None else f"{path} has step {step}"
        log_once(f"copies in host memory: the training resumes from that of step {copy.step}, because {than}")
        run_together(control, lambda: place.remove_after(copy.step) if hosts.leads else None, "copies in host memory")
        finding.fetch(copy, (storage.META, storage.METADATA), place, hosts, control)
        self._found_copy = copy
        return copy.path

    def _step_of(self, path: str, weights_only: bool | None) -> int | None:
        """The step of a checkpoint; ``None`` if it cannot be read. To load it then says why."""
        try:
            found = storage.find(path)
            if storage.is_folder(found):
                return folder.load_meta(found, weights_only).get("global_step")
            return file.read(writing_io(self.checkpoint_io), found, weights_only).get("global_step")
        except (CheckpointError, OSError):
            return None

    # ---- load --------------------------------------------------------------------------------------------------------
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        copy = self._found_copy
        self._reads_copy = copy is not None and os.fspath(checkpoint_path) == copy.path
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        finally:
            self._reads_copy = False
        self._last_copied = checkpoint.get("global_step", 0)
        return checkpoint

    def _find(self, path: str) -> tuple[str, bool]:
        if not self._reads_copy:
            return super()._find(path)
        assert self._found_copy is not None
        return self._found_copy.path, True  # Its path differs between hosts, and its files are verified.

    def before_tables_are_read(self) -> None:
        super().before_tables_are_read()
        copy, place, control = self._found_copy, self._copy_place, self.control
        if copy is None or place is None:
            return
        assert control is not None
        tables = {name: value for name, value in self._module.state_dict().items() if is_sharded(value)}
        state = {"state_dict": tables, "table_optimizer": self._optimizer_tensors()}
        needed = run_together(
            control, lambda: finding.needed_files(folder.read_metadata(copy.path), state), finding.FETCHING
        )
        finding.fetch(copy, needed, place, self._copy_hosts, control)

    def forget_loaded(self) -> None:
        super().forget_loaded()
        self._found_copy = None

    # ---- end ---------------------------------------------------------------------------------------------------------
    def remove_host_copies(self) -> None:
        """The training has come to its end on all ranks."""
        if self._copy_place is not None and self._copy_hosts.leads:
            self._copy_place.remove()

    def close_saves(self) -> None:
        super().close_saves()
        if self._copy_place is None:
            return
        failed = is_interrupted(self._module.trainer)
        if (error := self._copy_saves.close(LAST_COPY_SECONDS if failed else None)) is not None:
            logger.error("a copy in host memory failed: %s", error)
        compat.remove_callback(self._module.trainer, self._copy_callback)
        self._copy_place = self._copy_callback = None
