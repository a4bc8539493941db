"""Trains tables with zero-collision ids on a GPU: prioritized, synchronous, and synchronous on the CPU of the same machine.

``test_cluster.py`` starts each rank. Rank 0 prints one JSON line. Slots, identities and ages must be those of the CPU, exactly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lightning_freescale as fs
import lightning_freescale.transport
from benchmarks.harness.rank_setup import use_device
from lightning_freescale.embedding.schedule import ExchangeSchedule
from tests.embedding.zero_collision import training
from tests.embedding.zero_collision.sabotage import never_undo, write_all_fresh_rows_early
from tests.embedding.zero_collision.training import STEPS, Trained, drifting_batches, to_kjt
from tests.gpu.sleeping_waits import sleep_in_waits

SCALE = 8
training.DIM = 32
training.TABLES = {"item": (640, ["clicks", "negatives"]), "shop": (384, ["shops"])}
# Early releases of TorchRec need a number of buckets that the ranks divide.
OPTIONS = {
    "item": fs.ZeroCollision(buckets=8, max_probe=40, evict="ttl", ttl=1, insert=["clicks"], reserved=2),
    "shop": fs.ZeroCollision(buckets=16, max_probe=3, evict="lru", ttl=2),
}
INTEGERS = "_hash_zch_"

Look = Callable[[int], bool]


def run(
    mode: str,
    device: str,
    optimizer: str,
    look: Look,
    backend: str | None,
    sabotage: Any = None,
    dedup: bool = False,
) -> dict[str, Any]:
    """Losses, the states after the steps that ``look`` chooses, and the counts of insertions."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = Trained(mode, optimizer, world, OPTIONS, device, backend, dedup)
    if sabotage is not None:
        assert trained.schedule is not None
        sabotage(trained.schedule)
    batches = [drifting_batches(peer, STEPS, 5, lambda r, s: 4 + 2 * r, SCALE) for peer in range(world)]
    kjts = [to_kjt(batch, device) for batch in batches[rank]]
    losses, states = [], []
    for step in range(STEPS):
        losses.append(trained.train_step(rank, batches, step, kjts))
        if look(step) or step == STEPS - 1:
            if trained.schedule is not None:
                trained.schedule.flush()
            losses.append(trained.evaluate(kjts[(step * 7) % STEPS]))
            states.append(trained.state())
    if trained.schedule is not None:
        assert trained.schedule.modules[0].synchronous_reason is None
        assert trained.schedule.modules[0].kjt_index == 0
    return {"losses": [loss.item() for loss in losses], "states": states, "counts": trained.counts().tolist()}


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest error of the losses and of the rows, relative to their size, and the number of integers that differ."""
    a, b = torch.tensor(found["losses"]), torch.tensor(expected["losses"])
    pairs = [
        (key, one[key], other[key])
        for one, other in zip(found["states"], expected["states"], strict=True)
        for key in expected["states"][0]
    ]
    assert found["states"][0].keys() == expected["states"][0].keys()
    rows = [_apart(x, y) for key, x, y in pairs if INTEGERS not in key]
    return {
        "losses": _apart(a, b),  # a loss near 0 is a sum of large terms, so the largest loss is the measure
        "rows": max(rows),
        "integers": sum(int((x != y).sum()) for key, x, y in pairs if INTEGERS in key),
    }


def _apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().nan_to_num(1e9).max() / expected.abs().max().clamp(min=1e-6))


def unordered(schedule: ExchangeSchedule) -> None:
    """Do not let the exchange wait for the compute stream."""
    stream = schedule.modules[0].exchange.table_stream
    work = stream.work
    stream.work = lambda *after, compute=False: work(*after)  # type: ignore[method-assign]


def main() -> None:
    device = sys.argv[2] if len(sys.argv) > 2 else "cuda"  # "cpu" runs the script without a GPU
    if device == "cuda":
        sleep_in_waits()
        use_device("cuda")
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    training.host_group = dist.new_group(backend="gloo")
    backend = sys.argv[1] if device == "cuda" else None  # backend of the process groups for rows and gradients
    every: Look = lambda step: True  # noqa: E731
    some: Look = lambda step: step % 5 == 3  # noqa: E731
    results: dict[str, Any] = {"cases": []}
    cases = [("rowwise_adagrad", every), ("rowwise_adagrad", some), ("sgd", some), ("adagrad", some), ("adam", some)]
    for optimizer, look in cases:
        if optimizer == "adam" and device == "cpu":
            continue
        prioritized = run("prioritized", device, optimizer, look, backend)
        synchronous = run("synchronous", device, optimizer, look, backend)
        case = {"optimizer": optimizer, "counts": prioritized["counts"]}
        case["synchronous"] = compare(prioritized, synchronous)
        if optimizer != "adam":  # FBGEMM's CPU kernels have no Adam
            case["cpu"] = compare(prioritized, run("synchronous", "cpu", optimizer, look, None))
        results["cases"].append(case)
        if optimizer == "sgd":
            for sabotage in (never_undo, write_all_fresh_rows_early, unordered):
                wrong = run("prioritized", device, optimizer, look, backend, sabotage)
                results[sabotage.__name__] = compare(wrong, synchronous)
    distinct = [run(mode, device, "sgd", some, backend, dedup=True) for mode in ("prioritized", "synchronous")]
    results["dedup"] = compare(*distinct)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
