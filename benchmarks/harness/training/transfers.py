"""How long the bytes of a step take if nothing else runs. At these rates a step cannot be shorter, whatever it overlaps."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.gpu_cluster.transports import HOST, NCCL, TCP
from benchmarks.harness.variant_names import ALL, ALL_OVER_TCP, SM_FREE

_LINK_OF_TABLES = {SM_FREE: HOST, ALL: HOST, ALL_OVER_TCP: TCP}  # that of all other variants is NCCL


def all_reduce_bytes(gradient_bytes: float, ranks: int) -> float:
    """What a rank sends in a ring AllReduce: each part of the gradients once to be summed, and once as a sum.

    >>> all_reduce_bytes(100.0, 4)
    150.0
    """
    return 2 * (ranks - 1) / ranks * gradient_bytes


def transfers_ms(
    name: str, sent_bytes: float, dense_bytes: float, ranks: int, gb_per_s: Mapping[str, float]
) -> float | None:
    """Milliseconds for the bytes that a rank sends in a step; None if the rate of a link is not known.

    The dense gradients always travel over NCCL. NCCL and TCP share the network. Host memory is another link, and both can work
    at the same time.

    Args:
        name: the variant.
        sent_bytes: what a rank sends in a step for the tables.
        dense_bytes: size of the dense gradients of a rank.
        ranks: number of ranks.
        gb_per_s: the rate of each link without compute.
    """
    link = _LINK_OF_TABLES.get(name, NCCL)
    if link not in gb_per_s or NCCL not in gb_per_s:
        return None
    tables, dense = sent_bytes / gb_per_s[link] / 1e6, all_reduce_bytes(dense_bytes, ranks) / gb_per_s[NCCL] / 1e6
    return max(tables, dense) if link == HOST else tables + dense
