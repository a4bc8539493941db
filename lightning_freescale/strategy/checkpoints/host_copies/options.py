"""The options of copies in host memory, and the name of the training to which they belong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_freescale.runtime.errors import ConfigurationError


@dataclass(frozen=True)
class HostCopies:
    """Copies of the training state in the memory of two hosts: ``FreeScaleStrategy(host_copies=...)``.

    Args:
        every_n_steps: the distance between two copies.
        folder: a folder in the memory of the host, or another one that outlives the processes.
        run: the name of the training. A restart must have the same name, and another training another one. By default it is the
            id of torchrun (``--rdzv-id``), or the ids of SLURM's job and step.
    """

    every_n_steps: int = 50
    folder: str = "/dev/shm"
    run: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.every_n_steps, int) or self.every_n_steps < 1:
            raise ConfigurationError(f"HostCopies(every_n_steps={self.every_n_steps!r}): give a number of at least 1")

    def name_of_run(self, environment: Mapping[str, str] = os.environ) -> str:
        """The name of the training. Raises :class:`ConfigurationError` if nothing tells it from other trainings."""
        torchrun = environment.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's default is "none" for every training.
        job, step = (environment.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        name = (
            self.run or (torchrun if torchrun != "none" else None) or (f"slurm {job}.{step}" if job and step else None)
        )
        if name is None:
            raise ConfigurationError(
                "HostCopies(run=None): the training has no name by which a restart finds its copies. Give run=..., which no "
                "other training may have, or start torchrun with --rdzv-id"
            )
        return name
