"""Batches of samples: their standard type, a search inside batches of any type, and checks on the host.

* ``seq_batch.py``: :class:`~.seq_batch.SeqBatch`, the batch type of the data module and of HSTU.
* ``torchrec_types.py``: TorchRec's jagged ids and tables; ``plain_jagged.py`` stands in for them where TorchRec is missing.
* ``contents.py``: finds the tensors and jagged tensors inside a batch of any type.
* ``checks.py``: ``check_batch`` refuses a batch that cannot be trained on. It accepts any type of batch.
* ``reused_memory.py``: refuses a loader that writes a batch into the memory of a batch that was not trained yet.
* ``jagged_checks.py``: refuses a jagged tensor with wrong lengths or ids. The other checks use it.
"""
