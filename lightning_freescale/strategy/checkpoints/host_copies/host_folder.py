"""The folder of one host in which copies lie: written under another name and renamed, listed, checked, removed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from lightning_freescale.runtime.errors import CheckpointError, ConfigurationError
from lightning_freescale.runtime.log import logger
from lightning_freescale.strategy.checkpoints import storage
from lightning_freescale.strategy.checkpoints.storage import Checksums, LocalTarget

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # It differs between all hosts.
_STEP = re.compile(r"step=(\d+)")


class HostFolder:
    """The copies of one training on one host.

    Args:
        folder: the user's folder, in which this one lies.
        run: the name of the training.
    """

    def __init__(self, folder: str, run: str):
        name = f"freescale_copies_{os.getuid()}_{hashlib.sha256(run.encode()).hexdigest()[:16]}"
        self.path = Path(folder) / name
        self.described = False  # Whether the log has what copies take.

    def open(self) -> tuple[str, int, int]:
        """Make the folder, and return an identity that ranks have in common if they share it."""
        if not self.path.parent.is_dir():
            raise ConfigurationError(f"HostCopies(folder={str(self.path.parent)!r}): there is no such folder")
        self.path.mkdir(mode=0o700, exist_ok=True)
        found = self.path.lstat()
        if found.st_uid != os.getuid() or not self.path.is_dir():
            raise ConfigurationError(f"{self.path} belongs to another user. Give another HostCopies(folder=...)")
        boot = _BOOT.read_text().strip() if _BOOT.exists() else os.uname().nodename
        return boot, found.st_dev, found.st_ino

    def of_step(self, step: int) -> str:
        """Where the copy of a step lies."""
        return str(self.path / f"step={step}")

    def listing(self) -> dict[int, Checksums]:
        """For each step, the files of its copy on all hosts. A copy whose list is damaged is named in the log."""
        found = {}
        for step in self._steps():
            try:
                found[step] = storage.read_checksums(self.of_step(step))
            except CheckpointError as error:
                logger.warning("a copy in host memory is not used: %s", error)
        return found

    def undamaged(self, step: int, files: Checksums, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that lie on this host and are what was written. The log names the damaged ones."""
        path, found = self.of_step(step), []
        for name in names:
            if not (Path(path) / name).is_file():
                continue
            try:
                storage.check_file(path, name, files[name])
                found.append(name)
            except CheckpointError as error:
                logger.warning("a copy in host memory: %s", error)
        return found

    # ---- writing -----------------------------------------------------------------------------------------------------
    def prepare(self, step: int) -> str:
        """Make the folder for a new copy, and return its path. Only the newest copy before it is kept."""
        older = [other for other in self._steps() if other < step]
        self._remove_all_but(older[-1:])
        return self._target(step).prepare()

    def check_space(self, needed: int) -> None:
        """Raise :class:`CheckpointError` unless ``needed`` bytes are free."""
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise CheckpointError(
                f"{self.path.parent} has {free:,} bytes free, and the next copy needs {needed:,} bytes on this host, beside the "
                "copy before it. Give another HostCopies(folder=...), make that file system larger, or use more hosts"
            )

    def commit(self, step: int, files: Checksums) -> None:
        """Put a copy that was written completely into its place."""
        target = self._target(step)
        target.commit(files)

    def adopt(self, step: int, files: Checksums) -> None:
        """Let this host hold files of a copy that other hosts have."""
        path = Path(self.of_step(step))
        if not path.exists() or storage.read_checksums(str(path)) != files:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(mode=0o700)
            (path / storage.CHECKSUMS).write_text(json.dumps(files, indent=1))

    # ---- removing ----------------------------------------------------------------------------------------------------
    def remove_after(self, step: int) -> None:
        """The training goes on from ``step``. Copies of later steps are not those of this training any more."""
        self._remove_all_but([other for other in self._steps() if other <= step])

    def remove(self) -> None:
        """Remove all copies of this training."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _target(self, step: int) -> LocalTarget:
        return LocalTarget(self.of_step(step))

    def _steps(self) -> list[int]:
        """The steps of the copies that are complete on this host, in ascending order."""
        entries = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(int(match[1]) for entry in entries if (match := _STEP.fullmatch(entry.name)))

    def _remove_all_but(self, steps: Sequence[int]) -> None:
        kept = {Path(self.of_step(step)).name for step in steps}
        for entry in list(self.path.iterdir()) if self.path.is_dir() else ():
            if entry.name not in kept:
                shutil.rmtree(entry, ignore_errors=True)
