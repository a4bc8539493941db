"""Recommendations from a trained model on one device, without TorchRec, FBGEMM and process groups.

* ``recommender.py``: :class:`Recommender`, histories in and the best items out, with or without stored states of users.
* ``model_file.py``: the exported file, which has everything that a :class:`Recommender` needs.
* ``state_file.py``: states of users as a Parquet file.
"""

from __future__ import annotations

from lightning_freescale.inference.recommender import Recommender
from lightning_freescale.inference.state_file import StoredStates, load_states, save_states

__all__ = ["Recommender", "StoredStates", "load_states", "save_states"]
