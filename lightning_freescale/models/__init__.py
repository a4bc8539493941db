"""Reference models to train with the strategy, and the parts they are built of.

Modules:

* :mod:`.hstu`: the model :class:`HSTU`, a LightningModule.
* :mod:`.attention`: jagged attention, with implementations for CPUs and for CUDA.
* :mod:`.norm` and :mod:`.norm_triton`: layer norms, and scaling of rows to length 1.
* :mod:`.loss`: sampled softmax over the next item.
* :mod:`.metrics`: HR@k and NDCG@k.
* :mod:`.tiles`: histories cut into tiles, for the loss and for the CUDA kernels.
"""

from __future__ import annotations

from lightning_freescale.models.hstu import HSTU

__all__ = ["HSTU"]
