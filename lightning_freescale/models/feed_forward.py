"""A feed-forward layer after each layer of HSTU, dense or of experts: its settings, the module, and the losses of the routers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_freescale.models.dropout import SampleDropout
from lightning_freescale.models.moe.experts import Save
from lightning_freescale.models.moe.layer import MoE, check_shape
from lightning_freescale.models.moe.parallel import SharedExperts
from lightning_freescale.models.norm import layer_norm
from lightning_freescale.runtime.errors import ConfigurationError

HIDDEN_FACTOR = 4  # hidden units by default, as a multiple of the width


@dataclass(frozen=True)
class FeedForward:
    """Settings of the feed-forward layers of a model.

    Attributes:
        experts: number of experts; 1 is an ordinary dense layer.
        top_k: experts of each event.
        hidden: hidden units of an expert; four times the width by default.
        save: what is kept for backward (:class:`~.moe.layer.MoE`).
        balance_loss: weight of the balance loss of each router in the loss, which is least if all experts get equally many
            events.
        z_loss: weight of the z-loss of each router, which keeps its scores small. Both losses are means over the events of a
            rank. Trainings that distribute the samples to ranks differently are equal only if both weights are 0.
        expert_parallel: in training, the ranks share the experts, and events travel to them (:mod:`.moe.parallel`).
        micro_chunks: with ``expert_parallel``, the number of parts of a batch. The events of one part travel while the layers
            compute another (:mod:`.micro_chunks`). ``None``: 2 on CUDA if there are several ranks, 1 otherwise.
    """

    experts: int = 1
    top_k: int = 1
    hidden: int | None = None
    save: Save = "ab"
    balance_loss: float = 0.01
    z_loss: float = 0.001
    expert_parallel: bool = False
    micro_chunks: int | None = None

    def __post_init__(self) -> None:
        check_shape(1 if self.hidden is None else self.hidden, self.experts, self.top_k, self.save)
        for name in ("balance_loss", "z_loss"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"feed_forward: {name} must not be negative, not {getattr(self, name)}")
        if self.micro_chunks is not None and self.micro_chunks < 1:
            raise ConfigurationError(f"feed_forward: micro_chunks must be at least 1, not {self.micro_chunks}")
        if (self.micro_chunks or 1) > 1 and not self.expert_parallel:
            raise ConfigurationError(
                f"feed_forward: micro_chunks={self.micro_chunks} needs expert_parallel=True: without it no events travel"
            )

    @staticmethod
    def of(option: FeedForward | MoE | Mapping[str, Any] | None, dim: int) -> FeedForward | None:
        """From the argument of a model of width ``dim``, which may come from a checkpoint or a YAML file.

        Of a :class:`MoE` the sizes are taken. Every layer draws weights of its own.
        """
        if isinstance(option, Mapping):
            return FeedForward(**option)
        if not isinstance(option, MoE):
            return option
        experts, width, hidden = option.w_in.shape[0], option.w_in.shape[1], option.w_out.shape[1]
        if width != dim:
            raise ConfigurationError(f"feed_forward: MoE(dim={width}, ...) does not fit embedding_dim {dim}")
        shared = option.expert_exchange is not None
        return FeedForward(experts, option.top_k, hidden, option.save, expert_parallel=shared)

    def layers(self, dim: int, count: int, dropout: float) -> list[FeedForwardLayer]:
        """``count`` layers of width ``dim``. Their dropout masks differ from those of as many layers of HSTU."""
        return [FeedForwardLayer(self, dim, dropout, count + number) for number in range(1, count + 1)]


class FeedForwardLayer(nn.Module):
    """``x + dropout(experts(norm(x)))``.

    Args:
        settings: the experts.
        dim: width of the input and the output.
        dropout: dropout rate of the output of the experts.
        number: tells the dropouts of one model apart.
    """

    def __init__(self, settings: FeedForward, dim: int, dropout: float, number: int) -> None:
        super().__init__()
        self.settings = settings
        self.norm = nn.LayerNorm(dim)
        hidden = settings.hidden or HIDDEN_FACTOR * dim
        self.moe = MoE(dim, hidden, settings.experts, settings.top_k, settings.save, settings.expert_parallel)
        self.dropout = SampleDropout(dropout, number)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """``x`` and the result are ``[N, D]``; ``keys [N]`` from ``row_keys`` is for dropout in training."""
        return x + self.dropout(self.moe(layer_norm(self.norm, x)), keys)

    def start(self, x: Tensor, keys: Tensor | None, experts: SharedExperts) -> StartedFeedForward:
        """:meth:`forward` of some events, up to the moment at which they leave for the ranks of their experts."""
        return StartedFeedForward(self, x, keys, experts)


class StartedFeedForward:
    """A feed-forward layer of some events, which are on their way to their experts."""

    def __init__(self, layer: FeedForwardLayer, x: Tensor, keys: Tensor | None, experts: SharedExperts) -> None:
        self._layer, self._x, self._keys = layer, x, keys
        self.tokens = layer.moe.start(layer_norm(layer.norm, x), experts)

    def finish(self) -> Tensor:
        """Wait for the outputs of the experts, and return the result of the layer."""
        return self._x + self._layer.dropout(self.tokens.result(), self._keys)


def take_router_losses(layers: Iterable[FeedForwardLayer]) -> tuple[Tensor | float, dict[str, Tensor]]:
    """What the routers add to the loss of the last forward, and what is logged about them. Without experts, 0 and nothing."""
    total: Tensor | float = 0.0
    loads, balances, zs = [], [], []
    for layer in layers:
        terms = layer.moe.take_terms()
        if terms is None or layer.settings.experts == 1:
            continue
        total = total + layer.settings.balance_loss * terms.balance + layer.settings.z_loss * terms.z
        loads.append(terms.load * layer.settings.experts)
        balances.append(terms.balance.detach())
        zs.append(terms.z.detach())
    if not loads:
        return total, {}
    load = torch.stack(loads)
    logged = {"busiest": load.max(), "idlest": load.min()}
    logged |= {"balance_loss": torch.stack(balances).mean(), "z_loss": torch.stack(zs).mean()}
    logged |= {f"layer_{number}/busiest": row.max() for number, row in enumerate(load, 1)}
    return total, {f"experts/{name}": value for name, value in logged.items()}


def make_feed_forwards(
    settings: FeedForward | None, dim: int, count: int, dropout: float
) -> tuple[dict[str, Any] | None, nn.ModuleList]:
    """The settings as plain numbers and strings, so that every ``torch.load`` reads them, and the layers.

    Args:
        settings: of all layers.
        dim: width of the layers.
        count: number of layers.
        dropout: dropout rate of the output of the experts.
    """
    if settings is None:
        return None, nn.ModuleList()
    return asdict(settings), nn.ModuleList(settings.layers(dim, count, dropout))
