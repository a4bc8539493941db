"""``OnlineCostFit``: fits the cost model during training, and with ``variable`` also the shares of the ranks.

Every rank measures its own steps. Every ``every`` steps a thread on each rank gathers the measurements of all ranks. Rank 0
fits the cost model and broadcasts the result, so that all ranks have the same bits even if their hardware differs. All ranks
start to use the result at the same step, ``every`` steps later. The training waits only if a round takes longer than that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
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

WINDOW = 4096  # latest measurements, over all ranks, that a fit uses
MIN_SAMPLE_TIME = 0.05  # fraction of the step time that samples must explain; the constant explains the remainder
_COEFFICIENTS = 4


class OnlineCostFit:
    """Turns measured step times into better planners.

    Args:
        planner: the first planner. Its cost model is the prior of all fits, see :meth:`CostModel.fit`.
        group: a gloo process group that nothing else uses.
        every: steps between two updates.
    """

    def __init__(self, planner: Planner, *, group: dist.ProcessGroup, every: int = 50):
        self.planner, self._prior = planner, planner.cost_model
        self.group, self.every = group, every
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.error = float("nan")  # of the current cost model: median of |predicted - measured| / measured
        self.planned_ahead = 0  # largest number of batches that this rank's loader has planned ahead of the training
        self.most_planned_ahead = 0  # the same, over all ranks, as of the last round
        self._observed: deque[NDArray[np.float64]] = deque(maxlen=every)
        self._rounds: deque[NDArray[np.float64]] = deque(maxlen=max(1, WINDOW // (every * self.world_size)))
        self._pending: _FitRound | None = None

    def observe(self, sums: ArrayLike, seconds: float) -> None:
        """Add a measured step of this rank. The measurement may come some steps late.

        Args:
            sums: ``[4]``, the :meth:`CostModel.sums` of its samples.
            seconds: its compute time.
        """
        if not (np.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds = {seconds} must be finite and positive")
        self._observed.append(np.append(np.asarray(sums, dtype=np.float64), seconds))

    def maybe_update(self, step: int) -> Planner | None:
        """Return the planner to use from this step on, or ``None`` if it has not changed. All ranks call this every step."""
        if step == 0 or step % self.every:
            return None
        changed = self._pending is not None and self._finish(self._pending)
        self._pending = _FitRound(self, self._pack())
        return self.planner if changed else None

    def close(self) -> bool:
        """Wait up to two seconds for the current round, so that the other ranks can complete it. Return whether it ended."""
        if self._pending is None:
            return True
        self._pending.thread.join(2.0)
        return not self._pending.thread.is_alive()

    # ---- checkpoints -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the current cost model and shares, equal on all ranks. The result of an unfinished round is not in it."""
        shares = self.planner.shares
        return {"cost_model": self.planner.cost_model.state_dict(), "shares": None if shares is None else list(shares)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore cost model and shares. The shares are ignored if the number of ranks or the mode has changed."""
        if set(state) != {"cost_model", "shares"}:
            raise CheckpointError(
                f"balance: the checkpoint has the keys {sorted(state)}, expected cost_model and shares"
            )
        model = replace(self.planner.cost_model)
        model.load_state_dict(state["cost_model"])
        shares = state["shares"]
        kept = self.planner.mode == "variable" and shares is not None and len(shares) == self.world_size
        self.planner = replace(self.planner, cost_model=model, shares=tuple(shares) if kept else self.planner.shares)

    # ---- a round ---------------------------------------------------------------------------------------------------
    def _pack(self) -> NDArray[np.float64]:
        """Return ``[every, 5]``: sums and seconds of the steps since the last round. Missing rows are NaN."""
        rows = np.full((self.every, _COEFFICIENTS + 1), np.nan)
        if self._observed:
            rows[: len(self._observed)] = np.stack(self._observed)
        self._observed.clear()
        return rows

    def fit(self, measured: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the four coefficients, their error, and the shares of the ranks (NaN unless the mode is ``variable``).

        Args:
            measured: ``[ranks, every, 5]``, what all ranks measured in this round.
        """
        self._rounds.append(measured)
        model, error = self.planner.cost_model, self.error
        by_rank = [own[np.isfinite(own).all(axis=1)] for own in np.concatenate(self._rounds, axis=1)]
        if self.planner.mode == "variable":
            by_rank = _at_equal_speed(by_rank, model)
        rows = np.concatenate(by_rank)
        if len(rows):
            sums, seconds = rows[:, :-1], rows[:, -1]
            if _fit_helps(self._prior, sums, seconds):
                model = self._prior.fit(sums, seconds)
            error = model.in_unit_of(sums, seconds).error(sums, seconds)
        shares = np.full(self.world_size, np.nan)
        if self.planner.mode == "variable":
            equal = (1 / self.world_size,) * self.world_size
            work = np.where(np.isfinite(measured[..., -1]), model.predict(np.nan_to_num(measured[..., :-1])), 0.0)
            shares = retune(self.planner.shares or equal, work.sum(axis=1), np.nansum(measured[..., -1], axis=1))
        return np.concatenate([model.coefficients, [error], shares])

    def _finish(self, pending: _FitRound) -> bool:
        """Start to use the result of a round. Return whether it changes the planner."""
        result, self.most_planned_ahead = pending.result()
        coefficients, (error, *shares) = result[:_COEFFICIENTS], result[_COEFFICIENTS:].tolist()
        self.error = error
        planner = replace(self.planner, cost_model=self.planner.cost_model.with_coefficients(coefficients.tolist()))
        if np.isfinite(shares).all():
            planner = replace(planner, shares=tuple(shares))
        changed, self.planner = planner != self.planner, planner
        return changed


def _at_equal_speed(by_rank: list[NDArray[np.float64]], model: CostModel) -> list[NDArray[np.float64]]:
    """Return the measurements of each rank, ``[m, 5]``, with the times scaled as if all ranks were equally fast.

    Ranks of different speed agree on the ratios between the costs of samples. A fit to the scaled times finds those ratios.
    """
    seconds = [float(np.median(own[:, -1] / model.predict(own[:, :-1]))) if len(own) else np.nan for own in by_rank]
    if not np.isfinite(seconds).any():
        return by_rank
    median = float(np.nanmedian(seconds))
    scales = [np.append(np.ones(_COEFFICIENTS), median / own) for own in seconds]
    return [own * scale for own, scale in zip(by_rank, scales, strict=True)]


def _fit_helps(prior: CostModel, sums: NDArray[np.float64], seconds: NDArray[np.float64]) -> bool:
    """Tell whether a fit predicts the measurements ``sums [m, 4]``, ``seconds [m]`` better than the ``prior``.

    The fit uses every other measurement; the remaining ones test it. On a machine that is busy with other work, step times
    may have little to do with the samples. Then the fit is not used, nor is a fit in which samples cost almost nothing.
    """
    training, test = (sums[::2], seconds[::2]), (sums[1::2], seconds[1::2])
    if not len(test[1]):
        return False
    fitted = prior.fit(*training)
    if fitted.constant > (1 - MIN_SAMPLE_TIME) * fitted.predict(sums).mean():
        return False
    return fitted.error(*test) < prior.in_unit_of(*training).error(*test)


class _FitRound:
    """One round, in a thread of its own: gather the measurements, fit on rank 0, broadcast the result."""

    def __init__(self, cost_fit: OnlineCostFit, rows: NDArray[np.float64]):
        self._cost_fit, self._rows = cost_fit, torch.from_numpy(rows)
        self._planned_ahead = torch.tensor(cost_fit.planned_ahead)
        self._result = torch.empty(_COEFFICIENTS + 1 + cost_fit.world_size, dtype=torch.float64)
        self._failure: Exception | None = None
        self.thread = threading.Thread(target=self._work, name="freescale-fit", daemon=True)
        self.thread.start()

    def result(self) -> tuple[NDArray[np.float64], int]:
        """Return the fit of rank 0, and the largest number of batches that any rank has planned ahead."""
        self.thread.join()
        if self._failure is not None:
            raise FreeScaleError(
                f"rank {self._cost_fit.rank}: the ranks could not exchange their step times: {self._failure}"
            ) from self._failure
        return self._result.numpy(), int(self._planned_ahead)

    def _work(self) -> None:
        cost_fit = self._cost_fit
        try:
            gathered = [torch.empty_like(self._rows) for _ in range(cost_fit.world_size)]
            dist.all_gather(gathered, self._rows, group=cost_fit.group)
            if cost_fit.rank == 0:
                self._result.copy_(torch.from_numpy(self._fit(torch.stack(gathered).numpy())))
            dist.broadcast(self._result, group=cost_fit.group, group_src=0)
            dist.all_reduce(self._planned_ahead, op=dist.ReduceOp.MAX, group=cost_fit.group)
        except Exception as error:  # result() raises it in the training thread
            self._failure = error

    def _fit(self, measured: NDArray[np.float64]) -> NDArray[np.float64]:
        cost_fit = self._cost_fit
        try:
            return cost_fit.fit(measured)
        except (ValueError, np.linalg.LinAlgError) as error:  # do not raise: the other ranks wait for the broadcast
            logger.warning("fit_costs: the fit to measured step times failed, so the costs do not change: %s", error)
            unknown = np.full(cost_fit.world_size, np.nan)
            return np.concatenate([cost_fit.planner.cost_model.coefficients, [cost_fit.error], unknown])
