"""What ``transport="auto"`` chooses in every situation, as a table. It is computed by the code that chooses."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch

from lightning_freescale.transport.choice import Capabilities, decide

_COLUMNS = ("tensors", "exchange", "ranks", "SM-free transport", "peer access", "RDMA", "NCCL", "engine", "reason")
_MISSING = "(what is missing)"


class Situation(NamedTuple):
    """What the choice depends on, for CUDA tensors."""

    nccl: bool
    overlapped: bool
    one_host: bool
    sm_free: bool
    peer_access: bool
    rdma: bool


WORDS = {  # for each field in the order of the columns: what True and False mean
    "overlapped": ("overlaps with compute", "synchronous"),
    "one_host": ("one host", "several hosts"),
    "sm_free": ("can run", "cannot run"),
    "peer_access": ("all GPUs", "not all GPUs"),
    "rdma": ("yes", "no"),
    "nccl": ("in torch", "not in torch"),
}


def choice_rows() -> list[tuple[str, ...]]:
    """``[rows][9]`` texts: the columns of the situation, the engine, the reason. Equal situations share a row."""
    grouped: dict[tuple[bool, str, str], list[Situation]] = {}
    for values in product((True, False), repeat=len(Situation._fields)):
        situation = Situation(*values)
        no_rdma = "" if situation.rdma else _MISSING
        found = Capabilities(
            situation.sm_free, _MISSING, None, 1, 0, "", situation.nccl, situation.peer_access, no_rdma
        )
        choice = decide("auto", torch.device("cuda"), situation.overlapped, situation.one_host, found)
        grouped.setdefault((situation.nccl, choice.engine, choice.reason), []).append(situation)
    on_cpu = decide("auto", torch.device("cpu"), True, True, None)
    rows: list[tuple[str, ...]] = [("CPU", *["any"] * len(WORDS), on_cpu.engine, on_cpu.reason)]
    for (_, engine, reason), situations in grouped.items():
        words = [_word({getattr(s, name) for s in situations}, *both) for name, both in WORDS.items()]
        rows.append(("CUDA", *words, engine, reason))
    return rows


def _word(values: set[bool], yes: str, no: str) -> str:
    return "any" if len(values) == 2 else yes if values == {True} else no


def choice_table() -> str:
    """The table in Markdown, as it stands in docs/options.md."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *choice_rows()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(choice_table())
