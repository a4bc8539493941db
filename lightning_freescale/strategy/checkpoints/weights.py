"""The weights of a checkpoint on their way into the model, which may be sharded or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_freescale.runtime.errors import CheckpointError
from lightning_freescale.strategy.checkpoints import folder
from lightning_freescale.strategy.checkpoints.tensors import fill_shards, is_sharded, shape_of, with_values
from lightning_freescale.strategy.control import Control


@dataclass
class PendingWeights:
    """Weights that were read and not loaded yet.

    Attributes:
        path: the checkpoint, for messages and to read the tables of a folder.
        state: the state dict. It lacks the tables of a folder.
        tables: the shapes of the tables that are in the folder ``path``; empty for a file.
        strict: as for ``load_state_dict``.
    """

    path: str
    state: dict[str, Any]
    tables: dict[str, tuple[int, ...]]
    strict: bool

    def load(self, module: nn.Module, control: Control) -> None:
        """Load into ``module``. Raises :class:`CheckpointError` on every rank if it does not fit. A collective."""
        own = module.state_dict()
        shapes = {name: tuple(value.shape) for name, value in self.state.items() if isinstance(value, torch.Tensor)}
        shapes |= self.tables
        error: Exception | None = None
        try:
            self._refuse_other_tables(own, shapes)
            known = {name: own[name] for name in self.tables if name in own}
            if known:
                folder.load_sharded(self.path, {"state_dict": known}, control)
            unknown = {name: torch.empty(shape, device="meta") for name, shape in self.tables.items()}
            ready = {**self.state, **unknown, **known}
            for name, value in self.state.items():
                if is_sharded(own.get(name)) and isinstance(value, torch.Tensor) and not is_sharded(value):
                    fill_shards(own[name], value)
                    ready[name] = own[name]
            self._load_state_dict(module, with_values(self.state, ready), shapes)
        except Exception as failure:
            error = failure
        folder.raise_together(control, error, where="loading a checkpoint")

    def _refuse_other_tables(self, own: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
        for name, value in own.items():
            if is_sharded(value) and name in shapes and shapes[name] != shape_of(value):
                raise self._other_model(own, shapes)

    def _load_state_dict(self, module: nn.Module, ready: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
        try:
            module.load_state_dict(ready, strict=self.strict)
        except RuntimeError as failure:
            raise self._other_model(module.state_dict(), shapes, failure) from failure

    def _other_model(
        self, own: Mapping[str, Any], there: Mapping[str, Any], failure: Exception | None = None
    ) -> CheckpointError:
        """The error for weights ``there`` that do not fit the model with the state dict ``own``."""
        here = {name: shape_of(value) for name, value in own.items() if isinstance(value, torch.Tensor)}
        problems = [
            f"{name} has shape {list(there[name])} there and {list(here[name])} here"
            for name in sorted(there.keys() & here.keys())
            if there[name] != here[name]
        ]
        if self.strict:
            problems += [f"{name} is missing there" for name in sorted(here.keys() - there.keys())]
            problems += [f"{name} is unknown here" for name in sorted(there.keys() - here.keys())]
        if not problems:
            return CheckpointError(f"{self.path} cannot be loaded: {failure}")
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        return CheckpointError(f"{self.path} belongs to another model: {'; '.join(problems[:5])}{more}")


def optimizer_states_without_tables(
    states: list[dict[str, Any]], positions: list[list[list[int]]]
) -> list[dict[str, Any]]:
    """States of the user's optimizers as another strategy wrote them, without the tables.

    Other strategies train the tables with the user's optimizers. This strategy takes them out.

    Args:
        states: ``state_dict()`` of each optimizer.
        positions: for each optimizer and parameter group, the positions at which there were tables.
    """
    result = []
    for state, of_groups in zip(states, positions, strict=False):
        groups, dropped = [], set()
        for group, removed in zip(state["param_groups"], of_groups, strict=False):
            dropped |= {group["params"][index] for index in removed if index < len(group["params"])}
            groups.append({**group, "params": [key for key in group["params"] if key not in dropped]})
        kept = {key: value for key, value in state["state"].items() if key not in dropped}
        result.append({**state, "state": kept, "param_groups": groups})
    return result + states[len(result) :]
