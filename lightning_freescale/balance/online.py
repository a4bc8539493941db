"""``OnlineFit``: the cost model, and with ``variable`` the shares of the ranks, learnt while training.

Every rank observes its own steps. Now and then a thread gathers what all have seen, rank 0 fits, and everybody gets the
result, so that it is the same bits everywhere whatever the hardware. It comes into force some steps later, at the same
step on all ranks. The training waits for nothing, unless gathering takes longer than all the steps between.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.balance.autotune import retune
from lightning_freescale.balance.cost import CostModel
from lightning_freescale.balance.planner import Planner
from lightning_freescale.runtime.errors import CheckpointError, FreeScaleError
from lightning_freescale.runtime.log import logger

WINDOW = 4096  # measurements that a fit looks back on
LEAST = 0.05  # of the time of a step that samples must account for
_COEFFICIENTS = 4


class OnlineFit:
    """Makes better planners out of measured steps.

    Args:
        planner: to begin with. Its cost model says what measurements leave open, see :meth:`CostModel.fit`.
        group: a gloo process group that nobody else uses.
        every: steps between two updates.
    """

    def __init__(self, planner: Planner, *, group: dist.ProcessGroup, every: int = 50):
        self.planner, self._prior = planner, planner.cost_model
        self.group, self.every = group, every
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.error = float("nan")  # of the cost model in force: median of |predicted - measured| / measured
        self.ahead = 0  # batches that this rank's loader has planned beyond the one in training, at most
        self.most_ahead = 0  # of all ranks, as of the last round
        self._observed: deque[NDArray[np.float64]] = deque(maxlen=every)
        self._rounds: deque[NDArray[np.float64]] = deque(maxlen=max(1, WINDOW // (every * self.world_size)))
        self._pending: _Round | None = None

    def observe(self, sums: ArrayLike, seconds: float) -> None:
        """A step of this rank: :meth:`CostModel.sums` of its samples, and the time it computed. May come steps late."""
        if not (np.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds = {seconds} must be finite and positive")
        self._observed.append(np.append(np.asarray(sums, dtype=np.float64), seconds))

    def maybe_update(self, step: int) -> Planner | None:
        """Call after every step, on all ranks: the planner that is in force from here on, if it is a new one."""
        if step == 0 or step % self.every:
            return None
        changed = self._pending is not None and self._finish(self._pending)
        self._pending = _Round(self, self._pack())
        return self.planner if changed else None

    def close(self) -> None:
        """Leave; waits a little for a round under way."""
        if self._pending is not None:
            self._pending.thread.join(2.0)

    # ---- checkpoints -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Equal on all ranks. What a round under way would bring is not part of it."""
        shares = self.planner.shares
        return {"cost_model": self.planner.cost_model.state_dict(), "shares": None if shares is None else list(shares)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Shares are taken over if there are as many ranks as then."""
        if set(state) != {"cost_model", "shares"}:
            raise CheckpointError(f"balance: keys {sorted(state)} in the checkpoint, expected cost_model and shares")
        model = CostModel()
        model.load_state_dict(state["cost_model"])
        shares = state["shares"]
        kept = self.planner.mode == "variable" and shares is not None and len(shares) == self.world_size
        self.planner = replace(self.planner, cost_model=model, shares=tuple(shares) if kept else self.planner.shares)

    # ---- a round ---------------------------------------------------------------------------------------------------
    def _pack(self) -> NDArray[np.float64]:
        """``[every, 5]``: what was observed since the last round, the rest not a number."""
        rows = np.full((self.every, _COEFFICIENTS + 1), np.nan)
        if self._observed:
            rows[: len(self._observed)] = np.stack(self._observed)
        self._observed.clear()
        return rows

    def fit(self, seen: NDArray[np.float64]) -> NDArray[np.float64]:
        """From what all ranks saw, ``[ranks, every, 5]``, the new coefficients, their error, and the shares of the ranks."""
        self._rounds.append(seen)
        model, error = self.planner.cost_model, self.error
        by_rank = [own[np.isfinite(own).all(axis=1)] for own in np.concatenate(self._rounds, axis=1)]
        if self.planner.mode == "variable":
            by_rank = _at_one_speed(by_rank, model)
        rows = np.concatenate(by_rank)
        if len(rows):
            sums, seconds = rows[:, :-1], rows[:, -1]
            if _explains(self._prior, sums, seconds):
                model = self._prior.fit(sums, seconds)
            error = model.in_unit_of(sums, seconds).error(sums, seconds)
        shares = np.full(self.world_size, np.nan)
        if self.planner.mode == "variable":
            equal = (1 / self.world_size,) * self.world_size
            work = np.where(np.isfinite(seen[..., -1]), model.predict(np.nan_to_num(seen[..., :-1])), 0.0)
            shares = retune(self.planner.shares or equal, work.sum(axis=1), np.nansum(seen[..., -1], axis=1))
        return np.concatenate([astuple(model), [error], shares])

    def _finish(self, pending: _Round) -> bool:
        """Put the result of a round into force; whether it changes anything."""
        result, self.most_ahead = pending.result()
        coefficients, (error, *shares) = result[:_COEFFICIENTS], result[_COEFFICIENTS:].tolist()
        self.error = error
        planner = replace(self.planner, cost_model=CostModel(*coefficients.tolist()))
        if np.isfinite(shares).all():
            planner = replace(planner, shares=tuple(shares))
        changed, self.planner = planner != self.planner, planner
        return changed


def _at_one_speed(by_rank: list[NDArray[np.float64]], model: CostModel) -> list[NDArray[np.float64]]:
    """What each rank saw, ``[m, 5]``, with the times of all ranks as if they were equally fast.

    Ranks that differ in speed agree on what one sample costs against another, and a fit to all of them tells just that.
    """
    seconds = [float(np.median(own[:, -1] / model.predict(own[:, :-1]))) if len(own) else np.nan for own in by_rank]
    if not np.isfinite(seconds).any():
        return by_rank
    typical = float(np.nanmedian(seconds))
    scales = [np.append(np.ones(_COEFFICIENTS), typical / one) for one in seconds]
    return [own * scale for own, scale in zip(by_rank, scales, strict=True)]


def _explains(prior: CostModel, sums: NDArray[np.float64], seconds: NDArray[np.float64]) -> bool:
    """Whether a fit tells more of the measurements ``sums [m, 4]``, ``seconds [m]`` than the ``prior``.

    Half of them are fitted, the other half is foretold. On a machine that other work keeps busy, times may have little to do
    with samples: a fit to them, or one in which samples cost next to nothing, is no basis for a plan.
    """
    seen, unseen = (sums[::2], seconds[::2]), (sums[1::2], seconds[1::2])
    if not len(unseen[1]):
        return False
    fitted = prior.fit(*seen)
    if fitted.constant > (1 - LEAST) * fitted.predict(sums).mean():
        return False
    return fitted.error(*unseen) < prior.in_unit_of(*seen).error(*unseen)


class _Round:
    """Gather, fit on rank 0, broadcast: in a thread."""

    def __init__(self, online: OnlineFit, rows: NDArray[np.float64]):
        self._online, self._rows = online, torch.from_numpy(rows)
        self._ahead = torch.tensor(online.ahead)
        self._result = torch.empty(_COEFFICIENTS + 1 + online.world_size, dtype=torch.float64)
        self._failure: Exception | None = None
        self.thread = threading.Thread(target=self._work, name="freescale-fit", daemon=True)
        self.thread.start()

    def result(self) -> tuple[NDArray[np.float64], int]:
        """What rank 0 made of it, and how far the furthest rank has planned ahead."""
        self.thread.join()
        if self._failure is not None:
            raise FreeScaleError(
                f"rank {self._online.rank}: measured step times were not gathered: {self._failure}"
            ) from self._failure
        return self._result.numpy(), int(self._ahead)

    def _work(self) -> None:
        online = self._online
        try:
            seen = [torch.empty_like(self._rows) for _ in range(online.world_size)]
            dist.all_gather(seen, self._rows, group=online.group)
            if online.rank == 0:
                self._result.copy_(torch.from_numpy(self._fit(torch.stack(seen).numpy())))
            dist.broadcast(self._result, group=online.group, group_src=0)
            dist.all_reduce(self._ahead, op=dist.ReduceOp.MAX, group=online.group)
        except Exception as error:  # raised in the training thread
            self._failure = error

    def _fit(self, seen: NDArray[np.float64]) -> NDArray[np.float64]:
        online = self._online
        try:
            return online.fit(seen)
        except (ValueError, np.linalg.LinAlgError) as error:  # the others wait for the broadcast
            logger.warning("the cost model stays as it is: its fit to measured step times failed: %s", error)
            unknown = np.full(online.world_size, np.nan)
            return np.concatenate([astuple(online.planner.cost_model), [online.error], unknown])
