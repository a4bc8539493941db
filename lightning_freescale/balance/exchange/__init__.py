"""Balancing at run time: the ranks exchange samples in a background thread, before the training needs them.

This works with streams and with any loader, because the lengths of the samples need not be known in advance. All
communication uses host memory and a gloo process group of its own. For every batch the ranks

1. load their local batch, check it, and split it into samples (``local_batches.py``, ``split_batch.py``),
2. announce in one gather whether they have a batch (:class:`~.local_batches.BatchStatus`), and the history length, the
   candidate count and the bytes of each of its samples (``messages.py``),
3. compute the same partition of the samples to ranks (:class:`~lightning_freescale.balance.planner.Planner`),
4. send each sample to its rank, as bytes in one all-to-all (``packing.py``, ``messages.py``), and
5. build the new local batch, which has the type of the old one (``packing.py``).

If samples stay on their rank for many batches in a row, the ranks skip these steps for most batches
(``comparison_schedule.py``). The training thread then loads the skipped batches itself, as it would without balancing.

At the first batch the ranks also look for values that must not move with the samples (``places.py``). If they find some, all
samples stay on their rank.

Files: ``loader.py`` is the loader that the training iterates. ``background.py`` is the thread behind it, which runs the
steps above. ``planners.py`` keeps the planners as long as a rank may need them. The other files are one step each.
"""

from lightning_freescale.balance.errors import CannotBalance, PeerFailed
from lightning_freescale.balance.exchange.loader import ExchangeLoader, SampleExchangeStats

__all__ = ["CannotBalance", "ExchangeLoader", "PeerFailed", "SampleExchangeStats"]
