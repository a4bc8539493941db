"""Data: from files of events to the batches of every rank.

There are two ways from a file to batches:

* Preprocessed (default): ``sources/`` reads the file, ``preprocess.py`` turns its events into ``Histories`` in the cache, and
  ``HistoryDataset`` makes batches of them. The sampler in ``lightning_freescale.balance`` assigns samples to ranks by cost.
* Streamed: ``StreamIndex`` scans Parquet files once, and ``StreamDataset`` reads them during training.

The files in this folder:

* ``datamodule.py``: ``SeqRecDataModule``, the entry point. It chooses one of the two ways.
* ``sources/``: readers for Parquet, CSV and text files.
* ``columns.py``: converts and checks the columns of a file.
* ``vocabulary.py``: integer codes for raw ids and values.
* ``preprocess.py``: events of a source to histories.
* ``histories.py``: ``Histories``, the preprocessed data.
* ``catalogue.py``: ``Catalogue``, the ids behind the rows of a model, for checkpoints and other files.
* ``cache.py``: the cache on disk, safe for many processes.
* ``synthetic.py``: ``Synthetic``, generated histories.
* ``raw_ids.py``: the ids of a file as 64-bit integers.
* ``negatives.py``: ``NegativeSampler``.
* ``samples.py``: histories to samples (leave-one-out), and samples to a ``SeqBatch``.
* ``dataset.py``: ``HistoryDataset``, batches of preprocessed histories.
* ``stream_index.py``: ``StreamIndex``, what must be known about Parquet files before they are streamed.
* ``epoch_segments.py``: which samples of a streamed epoch are left after an interruption.
* ``stream.py``: ``StreamDataset`` and ``StreamLoader``, batches of streamed Parquet files.
"""

from lightning_freescale.runtime import requirements

if requirements.TORCHREC_PROBLEM is None:  # files can be read without TorchRec, but batches of several ranks need it
    from lightning_freescale.balance.sampler import GlobalBatchSampler
    from lightning_freescale.batch.seq_batch import SeqBatch
    from lightning_freescale.data.datamodule import SeqRecDataMixin, SeqRecDataModule
    from lightning_freescale.data.dataset import HistoryDataset
    from lightning_freescale.data.histories import Histories
    from lightning_freescale.data.negatives import NegativeSampler
    from lightning_freescale.data.stream import StreamDataset, StreamLoader
    from lightning_freescale.data.synthetic import Synthetic

__all__ = [
    "GlobalBatchSampler",
    "Histories",
    "HistoryDataset",
    "NegativeSampler",
    "SeqBatch",
    "SeqRecDataMixin",
    "SeqRecDataModule",
    "StreamDataset",
    "StreamLoader",
    "Synthetic",
]

if requirements.TORCHREC_PROBLEM is not None:
    __getattr__ = requirements.refusing(__name__, __all__)
