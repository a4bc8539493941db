"""What a sample costs: ``linear * L + quadratic * L^2 + candidate * candidates`` for a history of ``L`` events.

A cost model starts from the shape of the model, in FLOPs, and is fitted to measured step times, in seconds. The unit does
not matter to the plans, only the ratios do.

    >>> cost = CostModel.from_hstu(embedding_dim=256, num_layers=4, num_heads=4)
    >>> (cost([100, 1000, 10000]) / 1e9).round(2)  # GFLOPs, forward and backward
    array([  0.86,  15.03, 795.44])
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_freescale.runtime.errors import CheckpointError, ConfigurationError

# Step times below this share of a step cannot be told apart; also the weight of the prior against one measurement.
_RESOLUTION = 0.01
_HUBER = 1.345  # residuals beyond this many standard deviations count as outliers; 95% efficient on normal noise
_ITERATIONS = 100


@dataclass
class CostModel:
    """Cost of samples and of steps, in any one unit. Coefficients are finite and not negative.

    Attributes:
        linear: of each event of a history.
        quadratic: of the square of a history's length.
        candidate: of each candidate scored for a sample.
        constant: of a step on each rank, whatever its samples. It is part of :meth:`predict`, and of no sample's cost:
            it does not move with a sample.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    candidate: float = 0.0
    constant: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (np.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{name}: {value} must be finite and not negative")

    @classmethod
    def from_hstu(
        cls, embedding_dim: int, num_layers: int, num_heads: int, qk_dim: int | None = None, v_dim: int | None = None
    ) -> CostModel:
        """FLOPs of forward and backward of an HSTU of this shape.

        Args:
            embedding_dim: width ``D`` of the layers.
            num_layers: HSTU layers.
            num_heads: attention heads ``H``.
            qk_dim: width of a head's queries and keys, ``D / H`` by default.
            v_dim: width of a head's values, ``D / H`` by default.
        """
        qk, v = qk_dim or embedding_dim // num_heads, v_dim or embedding_dim // num_heads
        # u, v, q, k and the output projection: 2 FLOPs per weight and event, and twice that in backward.
        weights = embedding_dim * num_heads * (2 * qk + 2 * v) + embedding_dim * num_heads * v
        # Half of the L^2 pairs, 2 FLOPs per product: q.k, again in backward, dq, dk; and s.v, dv, ds.
        products = num_heads * (4 * qk + 3 * v)
        return cls(6.0 * num_layers * weights, float(num_layers * products), 6.0 * embedding_dim)

    def __call__(self, lengths: ArrayLike, candidates: ArrayLike | None = None) -> NDArray[np.float64]:
        """Cost of each sample, ``[n]``, from its history length ``[n]`` and its number of candidates ``[n]``."""
        events = np.asarray(lengths, dtype=np.float64)
        costs = self.linear * events + self.quadratic * events**2
        return costs if candidates is None else costs + self.candidate * np.asarray(candidates, dtype=np.float64)

    @staticmethod
    def sums(lengths: ArrayLike, candidates: ArrayLike | None = None) -> NDArray[np.float64]:
        """What a rank reports of a step, ``[4]``: sum of ``L``, of ``L^2``, of candidates, and 1 for the step."""
        events = np.asarray(lengths, dtype=np.float64)
        scored = 0.0 if candidates is None else np.asarray(candidates, dtype=np.float64).sum()
        return np.array([events.sum(), (events**2).sum(), scored, 1.0])

    def predict(self, sums: ArrayLike) -> NDArray[np.float64]:
        """Cost of steps, ``[m]``, from :meth:`sums` of each, ``[m, 4]``."""
        return np.asarray(sums, dtype=np.float64) @ np.array(astuple(self))

    def error(self, sums: ArrayLike, seconds: ArrayLike) -> float:
        """Median of ``|predicted - measured| / measured`` over steps: ``sums [m, 4]``, ``seconds [m]``."""
        features, measured = _check(sums, seconds)
        return float(np.median(np.abs(self.predict(features) - measured) / measured))

    def in_unit_of(self, sums: ArrayLike, seconds: ArrayLike) -> CostModel:
        """This model, its unit changed to that of measured steps: ``sums [m, 4]``, ``seconds [m]``."""
        features, measured = _check(sums, seconds)
        predicted = self.predict(features)
        known = predicted > 0
        scale = float(np.median(measured[known] / predicted[known])) if known.any() else 1.0
        return CostModel(*(scale * value for value in astuple(self)))

    def fit(self, sums: ArrayLike, seconds: ArrayLike) -> CostModel:
        """The model, in seconds, that explains measured step times; this one is the prior.

        Huber regression with coefficients that are not negative: a hiccup of a rank counts little. The prior, scaled to
        the measured times, decides what the measurements leave open: with histories of one length, for instance, how
        much of the time is linear and how much quadratic; or the cost of candidates, if there are none.

        Pure and deterministic. Ranks that gather the same measurements and run the same libraries get the same model;
        where hardware differs, fit on one rank and broadcast.

        Args:
            sums: ``[m, 4]``, :meth:`sums` of each step of each rank.
            seconds: ``[m]`` compute time of each, without waiting for other ranks; positive.
        """
        features, measured = _check(sums, seconds)
        if not len(measured):
            return CostModel(*astuple(self))
        centre = np.array(astuple(self.in_unit_of(features, measured)))
        # In units of the mean, a coefficient is the share of an average step that its term explains: all are about 1.
        means, mean_seconds = features.mean(axis=0), measured.mean()
        seen = means > 0
        unit = mean_seconds / means[seen]
        coefficients = centre.copy()
        coefficients[seen] = unit * _huber(
            features[:, seen] / means[seen], measured / mean_seconds, centre[seen] / unit
        )
        return CostModel(*coefficients.tolist())

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        expected = {field.name for field in fields(self)}
        if set(state) != expected:
            raise CheckpointError(f"cost model: keys {sorted(state)} in the checkpoint, expected {sorted(expected)}")
        for name, value in asdict(CostModel(**state)).items():
            setattr(self, name, float(value))


def _check(sums: ArrayLike, seconds: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    features, measured = np.asarray(sums, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if measured.ndim != 1 or features.shape != (len(measured), 4):
        raise ValueError(f"sums: shape {features.shape} does not fit seconds of shape {measured.shape}: [m, 4] and [m]")
    if not (np.isfinite(features).all() and (features >= 0).all()):
        raise ValueError("sums: must be finite and not negative")
    if (bad := np.flatnonzero(~(np.isfinite(measured) & (measured > 0)))).size:
        raise ValueError(f"seconds[{bad[0]}] = {measured[bad[0]]} must be finite and positive")
    return features, measured


def _huber(features: NDArray, target: NDArray, prior: NDArray) -> NDArray[np.float64]:
    """Huber regression by reweighted least squares: ``[m, p]`` features with mean 1, ``[m]`` target, ``[p]`` prior."""
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
    """``argmin_x>=0  sum_i weights_i (features_i . x - target_i)^2 + noise^2 |x - prior|^2``, exactly.

    The problem is strictly convex, so its solution is the best among those that fix some coefficients at 0 and leave the
    others free. There are at most four: all of the 16 cases are tried, on a triangle of 5 x 5.
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
