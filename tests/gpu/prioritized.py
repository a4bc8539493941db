"""Compares the prioritized exchange with the synchronous one on a GPU.

``test_cluster.py`` starts each rank. Rank 0 prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import lightning_freescale.transport  # noqa: F401 - registers the backend
from lightning_freescale.embedding.wire import parse_wire, torchrec_codecs
from tests.embedding import training
from tests.embedding.training import SHARDINGS, build, make_schedule, random_batches, tables, train

STEPS = 12
BFLOAT16 = torchrec_codecs(parse_wire("bfloat16"))
training.ROWS.update(one=4000, two=600)
training.DIM = 32


def main() -> None:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    backend = sys.argv[1] if len(sys.argv) > 1 else None  # backend of the process groups for rows and gradients
    results = []
    cases: list[tuple[str, str, dict[str, Any]]] = [
        *((kind, "rowwise_adagrad", {}) for kind in SHARDINGS),
        *(("row_wise", optimizer, {}) for optimizer in ("sgd", "adagrad", "adam")),
        ("mixed", "adam", {}),
        *((kind, "rowwise_adagrad", {"use_index_dedup": True}) for kind in ("row_wise", "mixed")),
        *((kind, "rowwise_adagrad", {"qcomm_codecs_registry": BFLOAT16}) for kind in ("row_wise", "mixed")),
    ]
    for kind, optimizer, options in cases:
        batches = random_batches(rank, STEPS, 7, lambda r, s: 24 + 8 * r, longest=40)
        rates: dict[str, Any] = {"rates": lambda step: 0.05 / (1 + 0.1 * step)}
        plain = build(kind, optimizer, world, "cuda", **options)
        expected = train(plain, batches, None, "cuda", **rates)
        module = build(kind, optimizer, world, "cuda", **options)
        schedule = make_schedule(module, backend)
        got = train(module, batches, schedule, "cuda", **rates)
        torch.cuda.synchronize()
        a, b = tables(plain), tables(module)
        line = {
            "kind": kind,
            "optimizer": optimizer,
            "dedup": "use_index_dedup" in options,
            "saved": schedule.modules[0].exchange.stats.bytes_saved,
            "lane": schedule.modules[0].synchronous_reason or "prioritized",
            "loss": _worst([abs(x - y) / max(1.0, abs(x)) for x, y in zip(expected, got, strict=True)]),
            "weights": _worst([float((a[key] - b[key]).abs().max()) for key in a if a[key].numel()]),
            "moved": _worst([float(a[key].abs().max()) for key in a if a[key].numel()]),
        }
        results.append(line)
        dist.barrier()
    apart = _unordered(rank, world, backend)
    if rank == 0:
        print("RESULT " + json.dumps({"cases": results, "unordered": apart}), flush=True)
    dist.destroy_process_group()


def _unordered(rank: int, world: int, backend: str | None) -> float:
    """Largest error of the weights if the exchange does not wait for the compute stream. The comparison must detect it."""
    batches = random_batches(rank, STEPS, 7, lambda r, s: 24 + 8 * r, longest=40)
    plain, module = (build("row_wise", "sgd", world, "cuda") for _ in range(2))
    train(plain, batches, None, "cuda")
    schedule = make_schedule(module, backend)
    stream = schedule.modules[0].exchange.table_stream
    work = stream.work
    stream.work = lambda *after, compute=False: work(*after)  # type: ignore[method-assign]
    train(module, batches, schedule, "cuda")
    torch.cuda.synchronize()
    a, b = tables(plain), tables(module)
    return _worst([float((a[key] - b[key]).abs().nan_to_num(1e9).max()) for key in a if a[key].numel()])


def _worst(values: list[float]) -> float:
    worst = torch.tensor(max(values, default=0.0), device="cuda")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


if __name__ == "__main__":
    main()
