"""A training step on any number of ranks, without any: what TorchRec and FreeScale would make of given histories and links.

    >>> import numpy as np
    >>> from lightning_freescale.balance import CostModel
    >>> lengths = np.minimum(np.random.default_rng(0).lognormal(7.3, 1.2, (8, 64 * 128)), 21_000).astype(np.int64)
    >>> cluster = Cluster(ranks=64, bandwidth=25e9, latency=1e-5)
    >>> model = Model(CostModel(linear=1e-6, quadratic=5e-10), row_bytes=2048)
    >>> for side in (TORCHREC, FREESCALE):
    ...     result = simulate(side, cluster, model, list(lengths))
    ...     print(f"{side.name:10} {1e3 * result.step:.0f} ms a step, bubble {result.bubble / result.step:.1%}")
    TorchRec   2980 ms a step, bubble 39.5%
    FreeScale  1811 ms a step, bubble 0.4%

Not simulated: lookups and updates of the tables, index kernels, input, the training loop, and other traffic on a link.
"""

from lightning_freescale.simulate.run import Result, simulate
from lightning_freescale.simulate.setting import FREESCALE, SIDES, SPARSE_DIST, TORCHREC, Cluster, Model, Side

__all__ = ["FREESCALE", "SIDES", "SPARSE_DIST", "TORCHREC", "Cluster", "Model", "Result", "Side", "simulate"]
