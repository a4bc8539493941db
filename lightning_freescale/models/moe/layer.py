"""A mixture of experts as a module: the router, its losses, and the experts."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_freescale.models.moe.exchange import ExpertExchange
from lightning_freescale.models.moe.experts import Save, apply_experts
from lightning_freescale.models.moe.parallel import SharedExperts, TravellingTokens, compute_in_turn
from lightning_freescale.runtime.errors import ConfigurationError

INITIAL_EXPERT_STD = 0.02


class RouterTerms(NamedTuple):
    """What a router adds to the loss, and how busy its experts are."""

    balance: Tensor  # scalar: 1 if all experts are equally likely, up to the number of experts if one gets all tokens
    z: Tensor  # scalar: mean squared logarithm of the sum of the exponentials of the scores
    load: Tensor  # [E] share of the copies that each expert gets, without gradient


class RouterSums(NamedTuple):
    """What :class:`RouterTerms` are computed from: sums over tokens, which can be added."""

    tokens: int
    copies: Tensor  # [E] of each expert, without gradient
    probabilities: Tensor  # [E]
    z: Tensor  # scalar

    def plus(self, other: RouterSums | None) -> RouterSums:
        if other is None:
            return self
        return RouterSums(
            other.tokens + self.tokens,
            other.copies + self.copies,
            other.probabilities + self.probabilities,
            other.z + self.z,
        )

    def terms(self, top_k: int) -> RouterTerms:
        tokens, experts = max(1, self.tokens), len(self.copies)
        load = self.copies / (tokens * top_k)
        return RouterTerms(experts * (load * self.probabilities).sum() / tokens, self.z / tokens, load)


class MoE(nn.Module):
    """A feed-forward layer of ``experts`` SwiGLU networks, of which every token uses ``top_k``. No token is dropped.

    The gates are the softmax of the router's scores over all experts. If ``top_k`` is more than 1, the gates of a token are
    divided by their sum. (With ``top_k=1`` the gate would become 1, and the router would have no gradient.) With one expert the
    layer is an ordinary dense one.

    Args:
        dim: width of the input and the output.
        hidden: hidden units of an expert.
        experts: number of experts.
        top_k: experts of a token.
        save: what is kept for backward: ``"ab"`` the result of the first product; ``"x"`` nothing but the input, and backward
            computes the first product again.
        expert_parallel: in training, the ranks share the experts (:mod:`.parallel`).

    Attributes:
        expert_exchange: how tokens travel between ranks; ``None`` without ``expert_parallel``.
    """

    sums: RouterSums | None

    def __init__(
        self, dim: int, hidden: int, experts: int = 1, top_k: int = 1, save: Save = "ab", expert_parallel: bool = False
    ) -> None:
        super().__init__()
        check_shape(hidden, experts, top_k, save)
        self.experts, self.top_k, self.save = experts, top_k, save
        self.router = nn.Parameter(torch.empty(experts, dim))
        self.w_in = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.w_out = nn.Parameter(torch.empty(experts, hidden, dim))
        self.sums = None
        self.expert_exchange = ExpertExchange() if expert_parallel else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values: normal scores and first weights, Xavier uniform second weights, as the layers of HSTU."""
        nn.init.normal_(self.router, std=INITIAL_EXPERT_STD)
        nn.init.normal_(self.w_in, std=INITIAL_EXPERT_STD)
        bound = (6 / (self.w_out.shape[1] + self.w_out.shape[2])) ** 0.5
        nn.init.uniform_(self.w_out, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, D]`` of ``x [T, D]``. Under autocast the products have its type. :meth:`take_terms` then has the losses."""
        self.sums = None
        experts = self.share_experts()
        if experts is not None:
            tokens = self.start(x, experts)
            tokens.open()
            compute_in_turn([tokens])
            return tokens.result()
        x = _autocast(x)
        with torch.autocast(x.device.type, enabled=False):
            gates, chosen = self.route(x)
            return apply_experts(x, gates, chosen, self.w_in, self.w_out, self.save)

    def share_experts(self) -> SharedExperts | None:
        """The experts that this rank computes in the next forward; ``None`` if it computes all of them for its own tokens."""
        exchange = self.expert_exchange
        if exchange is None or not self.training or exchange.world_size == 1:
            return None
        return SharedExperts(self.w_in, self.w_out, self.save, exchange)

    def start(self, x: Tensor, experts: SharedExperts) -> TravellingTokens:
        """Route some tokens ``x [T, D]`` of this rank's batch. They have not left yet.

        The losses of the router are those of all tokens since the last forward or :meth:`take_terms`.
        """
        x = _autocast(x)
        with torch.autocast(x.device.type, enabled=False):
            gates, chosen = self.route(x)
            return TravellingTokens(experts, x, gates, chosen)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gates and experts of each token, ``[T, k]`` each. The scores have at least float32."""
        scores = _Scores.apply(x, self.router)
        probabilities = scores.softmax(1)
        gates, chosen = probabilities.topk(self.top_k, 1)
        if self.top_k > 1:
            gates = gates / gates.sum(1, keepdim=True)
        if self.training:
            is_chosen = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
            z = scores.logsumexp(1).square().sum()
            self.sums = RouterSums(len(x), is_chosen.sum(0), probabilities.sum(0), z).plus(self.sums)
        return gates, chosen

    def take_terms(self) -> RouterTerms | None:
        """The terms of the last forward in training; they are forgotten, so that their graph is released."""
        found, self.sums = self.sums, None
        return None if found is None else found.terms(self.top_k)

    def flops_per_token(self) -> float:
        """FLOPs of a token, forward and backward: three products of ``D x H`` for each of its experts, and the router."""
        _, dim, width = self.w_in.shape
        return 6.0 * dim * (self.top_k * 3 * width / 2 + self.experts)

    def extra_repr(self) -> str:
        _, hidden, dim = self.w_out.shape
        return f"dim={dim}, hidden={hidden}, experts={self.experts}, top_k={self.top_k}, save={self.save!r}"


def _autocast(x: Tensor) -> Tensor:
    """``x`` in the type of autocast, if it is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def check_shape(hidden: int, experts: int, top_k: int, save: str) -> None:
    """Raise :class:`ConfigurationError` if a mixture of experts cannot have this shape."""
    for name, value in (("hidden", hidden), ("experts", experts)):
        if value < 1:
            raise ConfigurationError(f"{name}: must be at least 1, not {value}")
    if not 1 <= top_k <= experts:
        raise ConfigurationError(f"top_k: must be between 1 and experts ({experts}), not {top_k}")
    if save not in get_args(Save):
        raise ConfigurationError(f"save: {save!r} is unknown; choose one of {', '.join(get_args(Save))}")


class _Scores(torch.autograd.Function):
    """``x router^T`` in at least float32. It keeps ``x`` and no converted copy of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, router: Tensor) -> Tensor:
        ctx.save_for_backward(x, router)
        wide = torch.promote_types(torch.promote_types(x.dtype, router.dtype), torch.float32)
        return F.linear(x.to(wide), router.to(wide))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor, Tensor]:
        x, router = ctx.saved_tensors
        dx = dscores @ router.to(dscores.dtype)
        drouter = dscores.T @ x.to(dscores.dtype)
        return dx.to(x.dtype), drouter.to(router.dtype)
