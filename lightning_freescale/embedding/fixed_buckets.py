"""DDP whose buckets are the same in every step, so that a resumed training has the bits of an uninterrupted one.

DDP lays out its buckets anew after the first step, in the order in which the gradients were ready. From three ranks on,
the position of a gradient in its bucket decides in which order the ranks are added. The first step after a resume would
therefore round differently from the same step of the uninterrupted training.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel


class FixedBucketsDDP(DistributedDataParallel):
    """Lays out the buckets once: from the last parameter of the model to the first, as backward usually reaches them."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # DDP now takes the order of its list of parameters for the order in which gradients were ready.
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        parameters, expect_sparse = super()._build_params_for_reducer()
        return parameters[::-1], expect_sparse[::-1]
