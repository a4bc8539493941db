"""``CostModel``: a sample costs ``linear * L + quadratic * L^2 + candidate * candidates``, where ``L`` is its length.

A neural network whose attention does not grow with ``L^2`` gives a function that takes its place.

A cost model starts with the FLOPs of the neural network. A fit to measured step times changes its unit to seconds. Only the
ratios of the coefficients matter to a partition, not the unit.

    >>> cost = CostModel.from_hstu(embedding_dim=256, num_layers=4, num_heads=4)
    >>> (cost([100, 1000, 10000]) / 1e9).round(2)  # GFLOPs, forward and backward
    array([  0.86,  15.03, 795.44])
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.runtime.errors import CheckpointError, ConfigurationError

# The fit assumes at least this much noise in a step time, as a fraction of the mean step time. The assumed noise is also the
# weight of the prior against one measurement.
_RESOLUTION = 0.01
_HUBER = 1.345  # standard deviations; larger residuals count as outliers. The fit is 95% efficient on normal noise.
_ITERATIONS = 100
COEFFICIENTS = ("linear", "quadratic", "candidate", "constant")


@dataclass
class CostModel:
    """The cost of samples and of steps, in any unit. The coefficients are finite and not negative.

    Attributes:
        linear: cost of each event of a history.
        quadratic: coefficient of the squared length of a history.
        candidate: cost of each candidate that is scored for a sample.
        constant: cost of a step on each rank, independent of its samples. It counts in :meth:`predict`. It is not part of
            the cost of a sample, because it does not move with a sample.
        squares: takes lengths ``[n]`` float64 and returns what ``quadratic`` multiplies, ``[n]``; the squares by default.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    candidate: float = 0.0
    constant: float = 0.0
    squares: Callable[[NDArray[np.float64]], NDArray[np.float64]] = field(
        default=np.square, repr=False, compare=False, kw_only=True
    )

    def __post_init__(self) -> None:
        for name, value in self.state_dict().items():
            if not (np.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{name}: must be finite and not negative, not {value}")

    @classmethod
    def of_module(cls, module: Any) -> CostModel:
        """The cost model of a neural network.

        Args:
            module: has ``cost_coefficients()``, which returns the first three coefficients, and may have
                ``squared_lengths``, a function of the lengths that takes the place of ``L^2``. It must be picklable.
        """
        return cls(*module.cost_coefficients(), squares=getattr(module, "squared_lengths", np.square))

    @classmethod
    def from_hstu(
        cls, embedding_dim: int, num_layers: int, num_heads: int, qk_dim: int | None = None, v_dim: int | None = None
    ) -> CostModel:
        """Return the FLOPs of forward and backward of an HSTU of this shape.

        Args:
            embedding_dim: width ``D`` of the layers.
            num_layers: number of HSTU layers.
            num_heads: number of attention heads ``H``.
            qk_dim: width of the queries and keys of a head, ``D / H`` by default.
            v_dim: width of the values of a head, ``D / H`` by default.
        """
        qk, v = qk_dim or embedding_dim // num_heads, v_dim or embedding_dim // num_heads
        # The projections to u, v, q, k and the output projection: 2 FLOPs per weight and event in forward, 4 in backward.
        weights = embedding_dim * num_heads * (2 * qk + 2 * v) + embedding_dim * num_heads * v
        # Attention uses half of the L^2 pairs, with 2 FLOPs per product. Products of width qk_dim are q.k, the same again
        # in backward, dq and dk. Products of width v_dim are s.v, dv and ds.
        products = num_heads * (4 * qk + 3 * v)
        return cls(6.0 * num_layers * weights, float(num_layers * products), 6.0 * embedding_dim)

    def __call__(self, lengths: ArrayLike, candidates: ArrayLike | None = None) -> NDArray[np.float64]:
        """Return the cost of each sample, ``[n]``, from its history length ``[n]`` and candidate count ``[n]``."""
        events = np.asarray(lengths, dtype=np.float64)
        costs = self.linear * events + self.quadratic * self.squares(events)
        return costs if candidates is None else costs + self.candidate * np.asarray(candidates, dtype=np.float64)

    @property
    def coefficients(self) -> NDArray[np.float64]:
        """``[4]``: linear, quadratic, candidate and constant cost."""
        return np.array([self.linear, self.quadratic, self.candidate, self.constant])

    def with_coefficients(self, coefficients: Sequence[float]) -> CostModel:
        """This model with other :attr:`coefficients`."""
        return replace(self, **dict(zip(COEFFICIENTS, coefficients, strict=True)))  # type: ignore[arg-type]

    def sums(self, lengths: ArrayLike, candidates: ArrayLike | None = None) -> NDArray[np.float64]:
        """Return the features of a step on one rank, ``[4]``: the sums of ``L``, of ``L^2`` and of candidates, and 1."""
        events = np.asarray(lengths, dtype=np.float64)
        scored = 0.0 if candidates is None else np.asarray(candidates, dtype=np.float64).sum()
        return np.array([events.sum(), self.squares(events).sum(), scored, 1.0])

    def predict(self, sums: ArrayLike) -> NDArray[np.float64]:
        """Return the cost of steps, ``[m]``, from the :meth:`sums` of each, ``[m, 4]``."""
        return np.asarray(sums, dtype=np.float64) @ self.coefficients

    def error(self, sums: ArrayLike, seconds: ArrayLike) -> float:
        """Return the median of ``|predicted - measured| / measured`` over steps: ``sums [m, 4]``, ``seconds [m]``."""
        features, measured = _check(sums, seconds)
        return float(np.median(np.abs(self.predict(features) - measured) / measured))

    def in_unit_of(self, sums: ArrayLike, seconds: ArrayLike) -> CostModel:
        """Return this model, scaled to the unit of measured steps: ``sums [m, 4]``, ``seconds [m]``."""
        features, measured = _check(sums, seconds)
        predicted = self.predict(features)
        known = predicted > 0
        scale = float(np.median(measured[known] / predicted[known])) if known.any() else 1.0
        return self.with_coefficients((scale * self.coefficients).tolist())

    def fit(self, sums: ArrayLike, seconds: ArrayLike) -> CostModel:
        """Fit the coefficients to measured step times, in seconds. This model is the prior.

        The fit is a Huber regression with coefficients that are not negative, so single slow steps have little influence.
        The prior, scaled to the measured times, decides what the measurements leave open. Two examples: if all histories
        have one length, it decides how much of the time is linear and how much is quadratic; if there are no candidates,
        it decides their cost.

        The function is pure and deterministic. Ranks with the same measurements, the same libraries and the same hardware
        get the same model. If the hardware may differ, fit on one rank and broadcast the result.

        Args:
            sums: ``[m, 4]``, the :meth:`sums` of each step of each rank.
            seconds: ``[m]`` compute time of each step, without waits for other ranks; positive.
        """
        features, measured = _check(sums, seconds)
        if not len(measured):
            return self.with_coefficients(self.coefficients.tolist())
        centre = self.in_unit_of(features, measured).coefficients
        # Divide by the means: then a coefficient is the fraction of an average step that its term explains.
        means, mean_seconds = features.mean(axis=0), measured.mean()
        seen = means > 0
        unit = mean_seconds / means[seen]
        coefficients = centre.copy()
        coefficients[seen] = unit * _huber(
            features[:, seen] / means[seen], measured / mean_seconds, centre[seen] / unit
        )
        return self.with_coefficients(coefficients.tolist())

    def state_dict(self) -> dict[str, float]:
        """The coefficients by name. The function ``squares`` belongs to the neural network and is not saved."""
        return dict(zip(COEFFICIENTS, self.coefficients.tolist(), strict=True))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if set(state) != set(COEFFICIENTS):
            raise CheckpointError(
                f"cost model: the checkpoint has the keys {sorted(state)}, expected {sorted(COEFFICIENTS)}"
            )
        for name, value in self.with_coefficients([state[name] for name in COEFFICIENTS]).state_dict().items():
            setattr(self, name, value)


def _check(sums: ArrayLike, seconds: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    features, measured = np.asarray(sums, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if measured.ndim != 1 or features.shape != (len(measured), 4):
        raise ValueError(f"sums, seconds: shapes {features.shape} and {measured.shape}, expected [m, 4] and [m]")
    if not (np.isfinite(features).all() and (features >= 0).all()):
        raise ValueError("sums: must be finite and not negative")
    if (bad := np.flatnonzero(~(np.isfinite(measured) & (measured > 0)))).size:
        raise ValueError(f"seconds[{bad[0]}] = {measured[bad[0]]} must be finite and positive")
    return features, measured


def _huber(features: NDArray, target: NDArray, prior: NDArray) -> NDArray[np.float64]:
    """Run a Huber regression by reweighted least squares: features ``[m, p]`` of mean 1, target ``[m]``, prior ``[p]``."""
    weights, noise = np.ones_like(target), _RESOLUTION
    solution = prior
    for _ in range(_ITERATIONS):
        previous = solution
        solution = _nonnegative(features, target, prior, weights, noise)
        residuals = np.abs(target - features @ solution)
        noise = max(1.4826 * float(np.median(residuals)), _RESOLUTION)
        weights = np.minimum(1.0, _HUBER * noise / np.maximum(residuals, 1e-300))
        if np.allclose(solution, previous, rtol=1e-10, atol=1e-12):
            break
    return solution


def _nonnegative(
    features: NDArray, target: NDArray, prior: NDArray, weights: NDArray, noise: float
) -> NDArray[np.float64]:
    """Solve ``argmin_x>=0  sum_i weights_i (features_i . x - target_i)^2 + noise^2 |x - prior|^2`` exactly.

    The problem is strictly convex. Its solution fixes some coefficients at 0 and leaves the others free. There are at most
    four coefficients, so the function tries all of the at most 16 cases, on a QR triangle of at most 5 x 5 numbers.
    """
    root = np.sqrt(weights)
    count = len(prior)
    system = np.column_stack([features * root[:, None], target * root])
    pull = np.column_stack([noise * np.eye(count), noise * prior])
    triangle: NDArray[np.float64] = np.asarray(np.linalg.qr(np.concatenate([system, pull]), mode="r"))
    best, best_error = np.zeros(count), np.inf
    for case in itertools.product([False, True], repeat=count):
        free = np.flatnonzero(case)
        candidate = np.zeros(count)
        candidate[free] = np.linalg.lstsq(triangle[:, free], triangle[:, -1], rcond=None)[0]
        error = float(np.linalg.norm(triangle[:, :-1] @ candidate - triangle[:, -1]))
        if (candidate >= 0).all() and error < best_error:
            best, best_error = candidate, error
    return best
