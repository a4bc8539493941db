"""The cost model: its FLOPs, and its fit to measured times."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_freescale.balance import CostModel, cost
from lightning_freescale.models import HSTU
from lightning_freescale.runtime.errors import CheckpointError, ConfigurationError

TRUTH = CostModel(linear=2e-6, quadratic=1.5e-9, candidate=4e-8, constant=0.02)  # seconds
PRIOR = CostModel.from_hstu(embedding_dim=64, num_layers=2, num_heads=2)  # FLOPs, and other ratios


def measured_steps(steps: int, seed: int = 0, noise: float = 0.0, batch_size: int = 32) -> tuple[NDArray, NDArray]:
    """Return ``(sums [m, 4], seconds [m])`` of steps that follow ``TRUTH``, with a relative error of ``noise``."""
    rng = np.random.default_rng(seed)
    sums = []
    for _ in range(steps):
        lengths = np.minimum(rng.lognormal(7.3, 1.2, batch_size), 21_000).astype(np.int64)
        sums.append(CostModel().sums(lengths, lengths * rng.integers(16, 256, batch_size)))
    seconds = TRUTH.predict(sums)
    return np.array(sums), seconds * np.exp(noise * rng.standard_normal(steps))


def relative(model: CostModel, other: CostModel = TRUTH) -> NDArray:
    return np.abs(model.coefficients / other.coefficients - 1)


# ---- costs ----


def test_the_cost_of_a_sample_is_a_polynomial() -> None:
    model = CostModel(linear=3, quadratic=0.5, candidate=2, constant=100)
    assert model([1, 4]).tolist() == [3.5, 20.0]
    assert model([1, 4], [10, 0]).tolist() == [23.5, 20.0]
    assert model(np.array([2**33], dtype=np.int64))[0] == 3 * 2.0**33 + 0.5 * 2.0**66  # no overflow of int64
    assert model([]).shape == (0,)


def test_the_cost_of_a_step_is_that_of_its_samples_plus_the_constant() -> None:
    model = CostModel(linear=3, quadratic=0.5, candidate=2, constant=100)
    lengths, candidates = [1, 4, 7], [10, 0, 5]
    assert model.predict([model.sums(lengths, candidates)]) == model(lengths, candidates).sum() + 100
    assert model.sums([1, 4]).tolist() == [5, 17, 0, 1]


@pytest.mark.parametrize("shape", [(64, 2, 2, None, None), (96, 3, 4, 16, 40)])
def test_the_cost_from_the_shape_equals_the_cost_that_the_model_reports(shape: tuple) -> None:
    dim, layers, heads, qk, v = shape
    model = HSTU(10, embedding_dim=dim, num_layers=layers, num_heads=heads, qk_dim=qk, v_dim=v)
    assert CostModel.from_hstu(dim, layers, heads, qk, v).coefficients.tolist() == [*model.cost_coefficients(), 0.0]


def test_the_linear_coefficient_counts_the_weights_of_the_layers() -> None:
    model = HSTU(10, embedding_dim=48, num_layers=3, num_heads=4, qk_dim=8, v_dim=20)
    weights = sum(weight.numel() for weight in model.layers.parameters() if weight.dim() == 2)
    assert CostModel.from_hstu(48, 3, 4, 8, 20).linear == 6 * weights


# ---- fit ----


def test_fit_recovers_the_coefficients_from_a_prior_in_another_unit() -> None:
    sums, seconds = measured_steps(200)
    assert relative(PRIOR).max() > 1  # the prior is wrong
    fitted = PRIOR.fit(sums, seconds)
    assert relative(fitted).max() < 1e-3
    assert fitted.error(sums, seconds) < 1e-4


def test_the_fit_averages_noise() -> None:
    fitted = PRIOR.fit(*measured_steps(2000, noise=0.05))
    assert relative(fitted)[:3].max() < 0.1  # the constant is 1% of a step, less than the noise
    sums, seconds = measured_steps(200, seed=1)
    assert fitted.error(sums, seconds) < 0.01


def test_ten_percent_outliers_do_not_disturb_the_fit() -> None:
    sums, seconds = measured_steps(500, noise=0.02)
    hiccups = np.random.default_rng(2).random(500) < 0.1
    seconds[hiccups] *= 8
    clean_sums, clean = measured_steps(200, seed=1)
    assert PRIOR.fit(sums, seconds).error(clean_sums, clean) < 0.01
    least_squares = np.linalg.lstsq(sums, seconds, rcond=None)[0]
    assert (
        np.median(np.abs(clean_sums @ least_squares - clean) / clean) > 0.2
    )  # least squares without weights is disturbed


def test_histories_of_one_length_keep_the_ratio_of_the_prior() -> None:
    counts = np.arange(8, 40)
    sums = np.array([CostModel().sums(np.full(count, 500)) for count in counts])
    seconds = TRUTH.predict(sums)
    fitted = PRIOR.fit(sums, seconds)
    assert fitted.error(sums, seconds) < 1e-3
    ratio = (fitted.linear * 500) / (fitted.quadratic * 500**2)
    prior_ratio = (PRIOR.linear * 500) / (PRIOR.quadratic * 500**2)
    # The data cannot separate the two terms, so the fit keeps about the ratio of the prior.
    assert 0.5 < ratio / prior_ratio < 2


def test_identical_steps_give_the_scaled_prior() -> None:
    sums = np.repeat([CostModel().sums(np.full(32, 500), np.full(32, 64))], 50, axis=0)
    fitted = PRIOR.fit(sums, np.full(50, 0.25))
    scale = 0.25 / PRIOR.predict(sums[:1])[0]
    np.testing.assert_allclose(fitted.coefficients, PRIOR.coefficients * scale, rtol=1e-9, atol=1e-12)


def test_a_term_that_never_occurs_keeps_its_prior() -> None:
    sums, _ = measured_steps(100)
    sums[:, 2] = 0
    seconds = TRUTH.predict(sums)
    fitted = PRIOR.fit(sums, seconds)
    assert fitted.candidate == pytest.approx(PRIOR.candidate * np.median(seconds / PRIOR.predict(sums)))
    assert relative(fitted)[[0, 1, 3]].max() < 1e-3


def test_without_measurements_the_model_does_not_change() -> None:
    fitted = PRIOR.fit(np.empty((0, 4)), [])
    assert fitted == PRIOR
    assert fitted is not PRIOR


def test_a_rank_without_samples_determines_the_constant() -> None:
    sums, seconds = measured_steps(20)
    empty = np.repeat([CostModel().sums([])], 20, axis=0)
    both = np.concatenate([sums, empty])
    fitted = PRIOR.fit(both, np.concatenate([seconds, TRUTH.predict(empty)]))
    assert relative(fitted)[3] < 1e-2


@given(st.integers(0, 2**32), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_any_measurement_gives_finite_coefficients_that_are_not_negative(seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    sums = rng.choice([0.0, 1.0, 1e3, 1e9], (steps, 4)) * rng.random((steps, 4)) * (rng.random(4) < 0.8)
    seconds = 10.0 ** rng.uniform(-6, 3, steps)
    fitted = CostModel(*(rng.random(4) * (rng.random(4) < 0.7))).fit(sums, seconds)
    assert all(np.isfinite(value) and value >= 0 for value in fitted.coefficients)
    assert fitted == CostModel(*fitted.coefficients).fit(np.empty((0, 4)), [])


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_no_allowed_change_of_the_solution_lowers_the_objective(seed: int) -> None:
    rng = np.random.default_rng(seed)
    features, target = rng.random((20, 4)) * 2, rng.standard_normal(20) + 1
    weights, prior, noise = rng.random(20), rng.random(4), 0.05

    def objective(x: NDArray) -> float:
        return float((weights * (features @ x - target) ** 2).sum() + noise**2 * ((x - prior) ** 2).sum())

    solution = cost._nonnegative(features, target, prior, weights, noise)
    for step in rng.standard_normal((200, 4)) * 10.0 ** rng.uniform(-6, 0, (200, 1)):
        assert objective(np.maximum(solution + step, 0)) >= objective(solution) - 1e-12


def test_the_fit_is_deterministic_and_does_not_change_the_prior() -> None:
    before = PRIOR.coefficients.tolist()
    assert PRIOR.fit(*measured_steps(50, noise=0.1)) == PRIOR.fit(*measured_steps(50, noise=0.1))
    assert PRIOR.coefficients.tolist() == before


# ---- state and bad input ----


def test_the_state_survives_a_checkpoint() -> None:
    model = CostModel()
    model.load_state_dict(TRUTH.state_dict())
    assert model == TRUTH


def test_a_state_with_other_keys_is_refused_and_changes_nothing() -> None:
    model = CostModel(linear=7)
    with pytest.raises(CheckpointError, match="cost model: the checkpoint has the keys \\['linear', 'offset'\\]"):
        model.load_state_dict({"linear": 1.0, "offset": 2.0})
    with pytest.raises(ConfigurationError, match="quadratic: must be finite and not negative, not nan"):
        model.load_state_dict({**TRUTH.state_dict(), "quadratic": float("nan")})
    assert model == CostModel(linear=7)


@pytest.mark.parametrize(
    ("sums", "seconds", "message"),
    [
        ([[1, 1, 0]], [1.0], r"sums, seconds: shapes \(1, 3\) and \(1,\)"),
        ([[1, 1, 0, 1]], [1.0, 2.0], r"sums, seconds: shapes \(1, 4\) and \(2,\), expected"),
        ([[1, np.nan, 0, 1]], [1.0], "sums: must be finite and not negative"),
        ([[1, 1, 0, 1]], [0.0], r"seconds\[0\] = 0.0 must be finite and positive"),
        ([[1, 1, 0, 1]] * 2, [1.0, np.inf], r"seconds\[1\] = inf must be finite and positive"),
    ],
)
def test_invalid_measurements_are_refused(sums: list, seconds: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel().fit(sums, seconds)


def test_negative_coefficients_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"linear: must be finite and not negative, not -1.0"):
        CostModel(linear=-1.0)


def test_the_example_in_the_docstring_is_correct() -> None:
    results = doctest.testmod(cost)
    assert results.attempted > 0
    assert results.failed == 0


def test_a_network_may_replace_the_squares() -> None:
    """Calls, sums, fits and coefficients from a checkpoint use the function of the network."""

    class Network:
        def cost_coefficients(self) -> tuple[float, float, float]:
            return 1.0, 2.0, 3.0

        def squared_lengths(self, lengths: np.ndarray) -> np.ndarray:
            return 10 * lengths

    model = CostModel.of_module(Network())
    assert model([1, 4], [0, 1]).tolist() == [21, 87]
    assert model.sums([1, 4], [0, 1]).tolist() == [5, 50, 1, 1]
    assert model.predict([model.sums([1, 4], [0, 1])]) == 108
    steps = [[n, 2 * n] for n in range(1, 20)]
    sums = np.array([model.sums(step) for step in steps])
    fitted = model.fit(sums, 0.5 * model.predict(sums))
    assert fitted([1, 4], [0, 1]) == pytest.approx([10.5, 43.5])
    fitted.load_state_dict(CostModel(1.0).state_dict())
    assert fitted.squares is model.squares
    assert CostModel(1.0, 2.0)([3]) == 21
