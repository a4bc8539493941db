"""Checkpoints: one plain Lightning file, or a folder to which every rank writes its shards.

* ``hooks.py`` joins the hooks of the strategy: ``saving.py``, ``loading.py`` and what both share, ``shared_state.py``.
* ``format.py`` chooses between ``file.py`` (full tensors, every strategy can read it) and ``folder.py`` (shards).
* ``incremental.py``: folders with what has changed since the last full one (``changes.py``).
* ``safe_reading.py``: reads folders without running code from them.
* ``storage.py``: local folders and remote addresses, atomic replacement, checksums.
* ``tensors.py`` and ``weights.py``: between sharded tables and full tensors, and into the model.
* ``random_states.py``: a resumed run draws the numbers of the uninterrupted one.
* ``background.py``: asynchronous saves, whose outcome all ranks agree on. ``device_copy.py``: what they copy, on the device.
  ``table_copies.py``: when they copy the tables.
* ``host_copies/``: copies of the training state in the memory of two hosts.
* ``meeting.py``: saves while an exception is handled.
* ``plain_loading.py``: lets ``Model.load_from_checkpoint`` and other strategies read folders.
* ``verify.py``: checks a checkpoint without a Trainer, and finds the last undamaged one.
* ``export.py``: turns a checkpoint into one plain file, without process groups. ``id_map.py``: which row belongs to which id.
"""
