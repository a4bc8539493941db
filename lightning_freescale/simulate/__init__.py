"""Simulates training steps of TorchRec and FreeScale on any number of ranks, from history lengths and link speeds.

    >>> import numpy as np
    >>> from lightning_freescale.balance import CostModel
    >>> lengths = np.minimum(np.random.default_rng(0).lognormal(7.3, 1.2, (8, 64 * 128)), 21_000).astype(np.int64)
    >>> cluster = Cluster(ranks=64, bandwidth=25e9, latency=1e-5)
    >>> model = ModelProfile(CostModel(linear=1e-6, quadratic=5e-10), row_bytes=2048)
    >>> for variant in (TORCHREC, FREESCALE):
    ...     result = simulate(variant, cluster, model, list(lengths))
    ...     print(f"{variant.name:10} {1e3 * result.step:.0f} ms per step, bubble {result.bubble / result.step:.1%}")
    TorchRec   2980 ms per step, bubble 39.5%
    FreeScale  1811 ms per step, bubble 0.4%

The simulation leaves out the input, the host, and other traffic on a link. Look-ups and updates of the tables and index kernels
take no time unless the ``ModelProfile`` says how long they take.

Files, in the order in which a simulation uses them:
    scenario    the cluster, the model, and the variant of training to simulate
    loads       compute and rows of every rank in every step, from the history lengths of global batches
    schedules   the order of compute and transfers in a step, for TorchRec and for FreeScale
    events      the time that compute and transfers take on all ranks
    run         ``simulate``: runs a schedule on the loads, and returns step time, bubble and its parts
"""

from __future__ import annotations

from lightning_freescale.simulate.run import SimulationResult, simulate
from lightning_freescale.simulate.scenario import (
    FREESCALE,
    SPARSE_DIST,
    TORCHREC,
    VARIANTS,
    Cluster,
    ModelProfile,
    TrainingVariant,
)

__all__ = [
    "FREESCALE",
    "SPARSE_DIST",
    "TORCHREC",
    "VARIANTS",
    "Cluster",
    "ModelProfile",
    "SimulationResult",
    "TrainingVariant",
    "simulate",
]
