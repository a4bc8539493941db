"""Hides deprecation warnings between TorchRec, Lightning and torch. A user cannot act on them, and each rank would print them."""

from __future__ import annotations

import logging
import warnings

# TorchRec passes an argument of DistributedDataParallel by the name that it had before torch 2.13.
warnings.filterwarnings("ignore", r"`broadcast_buffers` is deprecated", FutureWarning)
# Lightning looks for the leaves of torch's pytrees in the way of torch before 2.13.
warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
# TorchRec calls torch's is_fx_tracing in every forward, which logs a warning each time.
logging.getLogger("torch.fx._symbolic_trace").addFilter(
    lambda record: not record.getMessage().startswith("is_fx_tracing will return true")
)
