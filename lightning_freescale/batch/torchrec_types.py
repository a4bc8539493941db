"""TorchRec's types of jagged ids and tables. On a machine without TorchRec, plain types that suffice for inference.

Code that also runs in inference imports the types from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_freescale.runtime.requirements import TORCHREC_PROBLEM

if TYPE_CHECKING or TORCHREC_PROBLEM is None:
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
    from torchrec.streamable import Pipelineable
else:
    from lightning_freescale.batch.plain_jagged import PlainJagged as JaggedTensor
    from lightning_freescale.batch.plain_jagged import PlainKeyedJagged as KeyedJaggedTensor
    from lightning_freescale.batch.plain_jagged import PlainTableConfig as EmbeddingConfig
    from lightning_freescale.batch.plain_jagged import PlainTables as EmbeddingCollection

    Pipelineable = object

__all__ = ["EmbeddingCollection", "EmbeddingConfig", "JaggedTensor", "KeyedJaggedTensor", "Pipelineable"]
