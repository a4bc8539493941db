"""One layer of HSTU (arXiv 2402.17152)."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_freescale.models.dropout import SampleDropout
from lightning_freescale.models.event_encoding import TIME_BUCKETS
from lightning_freescale.models.hstu_options import LinearInit
from lightning_freescale.models.initialization import draw_linear_maps
from lightning_freescale.models.layer_graphs.registry import release
from lightning_freescale.models.norm import gated_layer_norm, layer_norm
from lightning_freescale.models.sequences import Attention


class HSTULayer(nn.Module):
    """One layer: ``x + f2(norm(attention(q, k, v)) * u)`` with ``u, v, q, k = silu(f1(norm(x)))``.

    Args:
        dim: width ``D`` of the input and the output.
        heads: attention heads.
        qk_dim: width of a head's queries and keys.
        v_dim: width of a head's values.
        position_buckets: size of the position bias; 0 for attention without bias.
        dropout: dropout rate of the gated attention output.
        linear_init: initial values of the linear maps: ``"hstu"`` as published, ``"torch"`` as ``nn.Linear`` draws them.
        number: number of the layer in its model. The dropout masks of layers with different numbers differ.
    """

    position_bias: Tensor | None
    time_bias: Tensor | None

    def __init__(
        self,
        dim: int,
        heads: int,
        qk_dim: int,
        v_dim: int,
        position_buckets: int,
        dropout: float = 0.0,
        linear_init: LinearInit = "hstu",
        number: int = 1,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.split = [heads * v_dim, heads * v_dim, heads * qk_dim, heads * qk_dim]
        self.norm = nn.LayerNorm(dim)
        self.f1 = nn.Linear(dim, sum(self.split))
        for name, buckets in (("position_bias", position_buckets), ("time_bias", TIME_BUCKETS)):
            self.register_parameter(name, nn.Parameter(torch.zeros(buckets)) if position_buckets else None)
        self.attention_norm = nn.LayerNorm(heads * v_dim)
        self.dropout = SampleDropout(dropout, number)
        self.f2 = nn.Linear(heads * v_dim, dim)
        if linear_init == "hstu":
            draw_linear_maps(self.f1, self.f2)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or convert the parameters, as ``to`` does. CUDA graphs read them at their old addresses, so they are freed."""
        release(self)
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor, attention: Attention, keys: Tensor | None = None, *, total: bool = True) -> Tensor:
        """``x`` and the result are flat, ``[N, D]``, a row for each event.

        ``attention`` has the sequences of the events; ``keys [N]`` from ``row_keys`` is for dropout in training. On CUDA, with
        ``total=False``, the result is not added up, and the next layer takes it so (:class:`~.fused_layer.Summands`).
        """
        rows = x if isinstance(x, Tensor) else x.x
        if rows.is_cuda and len(rows) and (attention.differentiable_when_fused or not torch.is_grad_enabled()):
            out = self._fused(x, attention.plan, keys, attention)
            return out.total() if total else out
        return self.plain(x, attention, keys)

    def plain(self, x: Tensor, attention: Attention, keys: Tensor | None = None) -> Tensor:
        """:meth:`forward` part by part: on a CPU, and what the fused layer is compared with."""
        u, v, q, k = F.silu(self.f1(layer_norm(self.norm, x))).split(self.split, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v))
        attended = attention(q, k, v, self.position_bias, self.time_bias)
        return x + self.f2(self.dropout(gated_layer_norm(self.attention_norm, attended.flatten(1), u), keys))

    def _fused(self, x: Any, plan: Any, keys: Tensor | None, attention: Attention | None = None) -> Any:
        from lightning_freescale.models.fused_layer import fused_layer  # Triton is installed on CUDA machines only
        from lightning_freescale.models.norm_triton import Drop

        drop = None
        if self.training and self.dropout.rate:
            assert keys is not None, "keys: None; dropout needs the result of row_keys"
            drop = Drop(keys, self.dropout.number, self.dropout.rate)
        biases = self.position_bias, self.time_bias
        norms = self.norm, self.f1, biases, self.attention_norm, self.f2
        arranged = None if attention is None or type(attention) is Attention else attention
        return fused_layer(x, *norms, self.heads, self.split, plan, drop, arranged)
