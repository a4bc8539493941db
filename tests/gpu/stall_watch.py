"""Finds out what a rank waits for when its training makes no progress, prints it, and ends the rank.

A timeout says which transfer is missing. It does not say why: the transfer may have begun on all ranks, and a kernel before it
may never end. So the watch also prints the GPU work that has not been completed, in the order in which the host started it.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TextIO

import lightning.pytorch as pl
import torch

from benchmarks.harness.gpu_cluster.rank_process import EXIT_OF_TIMEOUT

KEPT = 200  # events of each stream
SHOWN = 12  # lines about each stream, and about each process group
LOOK_SECONDS = 0.2  # between two looks at the training


class LaunchNotes:
    """Notes which GPU work the host has started on each stream. An event behind each launch tells whether it is complete."""

    def __init__(self) -> None:
        self._noted: dict[int, deque[tuple[str, torch.cuda.Event]]] = defaultdict(lambda: deque(maxlen=KEPT))

    def note(self, name: str) -> None:
        """The current stream has been given the work ``name``. Within the capture of a graph nothing is noted."""
        if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()
            event.record()
            self._noted[torch.cuda.current_stream().cuda_stream].append((name, event))

    def incomplete(self) -> list[str]:
        """A line for each stream with work that is not complete: the last complete work, and what follows."""
        lines = []
        for stream, noted in list(self._noted.items()):
            names = [name for name, _ in noted]
            done = sum(event.query() for _, event in noted)
            if done < len(names):
                last = names[done - 1] if done else "nothing that is noted"
                lines.append(f"stream {stream:#x}: complete up to {last}; then {', '.join(names[done:][:SHOWN])}")
        return lines

    def wrap(self, owner: Any, method: str, name_of: Callable[..., str]) -> None:
        """Note each call of ``owner.method``. ``name_of`` gets its arguments."""
        original = getattr(owner, method)

        def noted(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            self.note(name_of(*arguments, **named))
            return result

        setattr(owner, method, noted)

    def watch_hstu(self) -> None:
        """Note the passes of the layers that run as CUDA graphs; of others the products, the Hopper kernels and the norm."""
        from lightning_freescale.models import fused_layer  # Triton is on CUDA machines only
        from lightning_freescale.models.attention.hopper.driver import Kernels
        from lightning_freescale.models.layer_graphs.layer import LayerGraph

        for product in ("mm", "addmm"):
            self.wrap(torch, product, lambda *args, name=product, **__: f"{name} of {[list(x.shape) for x in args]}")
        self.wrap(fused_layer, "norm_backward", lambda *_, **__: "norm_backward")
        self.wrap(Kernels, "launch", lambda kernels, name, *_, **__: name)
        for method in ("run_forward", "run_backward", "run_parameters"):
            self.wrap(LayerGraph, method, lambda layer, *_, name=method: f"{name} of layer {layer._number}")


def keep_transfers() -> None:
    """Let torch's flight recorder keep the last transfers of NCCL. Call it before the process groups are made."""
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "1000")


def incomplete_transfers() -> list[str]:
    """The transfers of NCCL that are not complete, see :func:`keep_transfers`."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)  # not in CPU builds
    if dump is None:
        return []
    entries = pickle.loads(dump(True, False, True)).get("entries", [])  # collectives, no stack traces, active ones only
    return [
        f"group {one['process_group'][0]}: {one['profiling_name']} {one['collective_seq_id']}, {one['state']}, "
        f"{one['input_sizes']}"
        for one in entries[:SHOWN]
    ]


class StallWatch(pl.Callback):
    """Ends the rank if its training makes no progress for ``seconds``, after it has printed what the rank waits for.

    Args:
        seconds: the limit.
        notes: the GPU work of this rank, if it is noted.
        out: receives the text.
    """

    def __init__(self, seconds: float, notes: LaunchNotes | None = None, out: TextIO = sys.stderr):
        self._seconds, self._notes, self._out = seconds, notes, out
        self._last, self._since = "nothing", time.monotonic()
        threading.Thread(target=self._watch, daemon=True, name="stall-watch").start()

    def limit(self, seconds: float) -> None:
        """Change the limit."""
        self._seconds = seconds

    def progress(self, what: str) -> None:
        """The training has come to ``what``."""
        self._last, self._since = what, time.monotonic()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.progress(f"the start of batch {batch_idx}")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.progress(f"the end of batch {batch_idx}")

    def on_validation_batch_end(self, *arguments: Any) -> None:
        self.progress("a batch of a validation")

    def _watch(self) -> None:
        while time.monotonic() - self._since <= self._seconds:
            time.sleep(LOOK_SECONDS)
        self._print(f"no progress for {self._seconds:g} s since {self._last}")
        faulthandler.dump_traceback(self._out, all_threads=True)
        for describe in (incomplete_transfers, self._notes.incomplete if self._notes is not None else list):
            try:
                self._print(*describe())
            except Exception as error:  # The GPU may be lost. What the others have found still helps.
                self._print(f"{type(error).__name__}: {error}")
        os._exit(EXIT_OF_TIMEOUT)

    def _print(self, *lines: str) -> None:
        for line in lines:
            print(f"rank {os.environ.get('RANK', '0')}: {line}", file=self._out, flush=True)
