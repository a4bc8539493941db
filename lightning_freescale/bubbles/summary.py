"""All metrics of a logging interval, by their tags in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from numpy.typing import NDArray

from lightning_freescale.bubbles import metrics
from lightning_freescale.bubbles.attribution import PARTS, Bubbles

TAGS = (
    "bubble/total",
    *(f"bubble/{part}" for part in PARTS),
    "balance/imbalance",
    "balance/sparsity",
    "embedding/collision_rate",
    "comm/overlap",
    "throughput/samples_per_s",
    "throughput/tokens_per_s",
    "step/time_ms",
)
ID_TAGS = ("ids/load", "ids/inserted", "ids/evicted", "ids/fallback", "ids/collisions")  # with zero-collision ids
# ``throughput/tflops`` needs a model with ``cost_coefficients()``; ``throughput/mfu`` also needs a device with a known peak.
MORE_TAGS = (
    "embedding/prioritized",
    "balance/cost_imbalance",
    "comm/mbytes_per_step",
    "throughput/tflops",
    "throughput/mfu",
    *ID_TAGS,
)


class Summary:
    """Computes all metrics from the bubbles of all ranks.

    Args:
        flops: whether ``counts["flops"]`` is known.
        peak: FLOP/s of one device; ``None`` if it is not known.
    """

    def __init__(self, flops: bool = False, peak: float | None = None):
        local: dict[str, Any] = {"sync_on_compute": False}  # every rank already has the steps of all ranks
        self._flops, self._peak = flops, peak
        self._shares = {f"bubble/{part}": metrics.BubbleShare(**local) for part in ("total", *PARTS)}
        self._imbalance, self._cost_imbalance = metrics.Imbalance(**local), metrics.Imbalance(**local)
        self._sparsity, self._collisions = metrics.PaddingSparsity(**local), metrics.CollisionRate(**local)
        self._overlap, self._bytes = metrics.OverlapEfficiency(**local), metrics.BytesExchanged(**local)
        self._samples, self._tokens, self._compute = (metrics.Rate(**local) for _ in range(3))
        self._mfu = metrics.Rate(peak=peak, **local)
        self._time = metrics.StepTime(**local)
        self._id_shares = {name: metrics.IdShare(**local) for name in ("ids/load", "ids/fallback", "ids/collisions")}
        self._id_rates = {name: metrics.IdsPerStep(**local) for name in ("ids/inserted", "ids/evicted")}

    def __call__(self, bubbles: Bubbles) -> dict[str, float]:
        """Values by tag. They cover the steps of ``bubbles`` and no earlier ones."""
        counts, wall = bubbles.counts, bubbles.wall
        ranks, steps = wall.shape
        seconds = wall.mean(axis=0)  # the ranks run at the same time
        for name, share in self._shares.items():
            part = name.removeprefix("bubble/")
            share.update(bubbles.bubble if part == "total" else bubbles.parts[part], wall)
        self._imbalance.update(bubbles.useful.T)
        self._cost_imbalance.update(counts["cost"].T)
        self._sparsity.update(counts["tokens"], counts["padded"])
        self._collisions.update(counts["collisions"], counts["rows"])
        self._overlap.update(bubbles.hidden, bubbles.exposed)
        self._bytes.update(counts["bytes"] / 1e6, ranks * steps)
        self._samples.update(counts["samples"], seconds, ranks)
        self._tokens.update(counts["tokens"], seconds, ranks)
        self._time.update(wall, ranks * steps)
        held: dict[str, Any] = {
            **self._shares,
            "balance/imbalance": self._imbalance,
            "balance/sparsity": self._sparsity,
            "embedding/collision_rate": self._collisions,
            "comm/overlap": self._overlap,
            "throughput/samples_per_s": self._samples,
            "throughput/tokens_per_s": self._tokens,
            "step/time_ms": self._time,
            "balance/cost_imbalance": self._cost_imbalance,
            "comm/mbytes_per_step": self._bytes,
        }
        if self._flops:
            self._compute.update(counts["flops"] / 1e12, seconds, ranks)
            held["throughput/tflops"] = self._compute
            if self._peak:
                self._mfu.update(counts["flops"], seconds, ranks)
                held["throughput/mfu"] = self._mfu
        if counts["ids_slots"].any():
            held |= self._ids(counts, steps)
        values = {}
        for name, metric in held.items():
            values[name] = float(metric.compute())
            metric.reset()
        return values

    def _ids(self, counts: Mapping[str, NDArray[np.float64]], steps: int) -> dict[str, Any]:
        """The metrics of zero-collision ids, updated with the counts of some steps."""
        self._id_shares["ids/load"].update(counts["ids_owned"], counts["ids_slots"])
        for name in ("fallback", "collisions"):
            self._id_shares[f"ids/{name}"].update(counts[f"ids_{name}"], counts["ids"])
        for name in ("inserted", "evicted"):
            self._id_rates[f"ids/{name}"].update(counts[f"ids_{name}"], steps)
        return {**self._id_shares, **self._id_rates}


# Dense bfloat16 products, from NVIDIA's data sheets, of GPUs that Lightning does not know or lists with sparsity.
_PEAK_BF16 = {"H200": 989.4e12, "GH200": 989.4e12, "B200": 2250e12}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of ``device`` at the Trainer's ``precision``; ``None`` if it is not known."""
    if device.type != "cuda":
        return None
    if "bf16" in precision:
        words = torch.cuda.get_device_name(device).split()
        known = [peak for name, peak in _PEAK_BF16.items() if name in words]
        return known[0] if known else get_available_flops(device, torch.bfloat16)
    return get_available_flops(device, torch.float32)
