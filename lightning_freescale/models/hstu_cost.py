"""How many FLOPs a sample of HSTU takes."""

from __future__ import annotations

from collections.abc import Iterable


def cost_coefficients(
    dim: int, heads: int, qk_dim: int, v_dim: int, layers: int, feed_forwards: Iterable[float]
) -> tuple[float, float, float]:
    """FLOPs of a sample, forward and backward: ``(a, b, c)`` in ``a * L + b * L^2 + c * candidates``.

    ``a``: the two linear maps of a layer take ``2 D H (2 Dqk + 3 Dv)`` per event in forward, and twice that in backward; a
    feed-forward layer takes three products of ``D`` times its hidden units for each expert of an event, and the router.
    ``b``: causal attention has ``L^2 / 2`` pairs of events. A pair takes ``2 H`` times ``4 Dqk`` (the scores, the scores
    again in backward, dq, dk) ``+ 3 Dv`` (the output, dv, the gradient of the weights) per layer. Biases add no products.
    ``c``: ``6 D`` per candidate. A sample of ``L`` events has ``(L - 1) * K`` candidates, with ``K`` negatives per position.

    Args:
        dim: width ``D`` of the layers.
        heads: attention heads.
        qk_dim: width of a head's queries and keys.
        v_dim: width of a head's values.
        layers: number of layers.
        feed_forwards: FLOPs of an event in each feed-forward layer.

    >>> cost_coefficients(64, 2, 32, 32, 1, [])
    (122880.0, 448.0, 384.0)
    """
    linear = 3.0 * layers * 2 * dim * heads * (2 * qk_dim + 3 * v_dim)
    attention = float(layers * heads * (4 * qk_dim + 3 * v_dim))
    return linear + sum(feed_forwards), attention, 6.0 * dim
