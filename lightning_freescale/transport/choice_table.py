"""What ``transport="auto"`` chooses in every situation, as a table. It is computed by the code that chooses."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch

from lightning_freescale.transport.choice import Capabilities, decide

_COLUMNS = ("tensors", "exchange", "ranks", "SM-free transport", "NCCL", "choice", "reason")
_MISSING = "(what is missing)"


class Situation(NamedTuple):
    """What the choice depends on, for CUDA tensors."""

    nccl: bool
    overlapped: bool
    one_host: bool
    sm_free: bool


def choice_rows() -> list[tuple[str, ...]]:
    """``[rows][7]`` texts: five columns of the situation, the backend, the reason. Equal situations share a row."""
    grouped: dict[tuple[bool, str, str], list[Situation]] = {}
    for values in product((True, False), repeat=4):
        situation = Situation(*values)
        found = Capabilities(situation.sm_free, _MISSING, None, 1, 0, "", situation.nccl)
        choice = decide("auto", torch.device("cuda"), situation.overlapped, situation.one_host, found)
        grouped.setdefault((situation.nccl, choice.backend, choice.reason), []).append(situation)
    on_cpu = decide("auto", torch.device("cpu"), True, True, None)
    rows: list[tuple[str, ...]] = [("CPU", "any", "any", "any", "any", on_cpu.backend, on_cpu.reason)]
    for (nccl, backend, reason), situations in grouped.items():
        words = (
            _word({s.overlapped for s in situations}, "overlaps with compute", "synchronous"),
            _word({s.one_host for s in situations}, "one host", "several hosts"),
            _word({s.sm_free for s in situations}, "can run", "cannot run"),
            "in torch" if nccl else "not in torch",
        )
        rows.append(("CUDA", *words, backend, reason))
    return rows


def _word(values: set[bool], yes: str, no: str) -> str:
    return "any" if len(values) == 2 else yes if values == {True} else no


def choice_table() -> str:
    """The table in Markdown, as it stands in docs/options.md."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *choice_rows()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
