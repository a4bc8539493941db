"""Deprecations between TorchRec, Lightning and torch that a user can do nothing about; each rank would print them."""

from __future__ import annotations

import logging
import warnings

# TorchRec still names DistributedDataParallel's argument as torch did before 2.13.
warnings.filterwarnings("ignore", r"`broadcast_buffers` is deprecated", FutureWarning)
# Lightning asks torch's pytrees for their leaves as before 2.13.
warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
# TorchRec asks in every forward whether it is being traced.
logging.getLogger("torch.fx._symbolic_trace").addFilter(
    lambda record: not record.getMessage().startswith("is_fx_tracing will return true")
)
