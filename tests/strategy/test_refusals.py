"""Settings that cannot be exact are refused with a reason, on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lightning_freescale import ConfigurationError, FreeScaleStrategy
from lightning_freescale.embedding.table_optimizer import fused_params
from lightning_freescale.strategy.refusals import refuse_inexact
from tests import toy
from tests.ranks import run_ranks


def fit_refused(rank: int, strategy_options: dict[str, Any], options: dict[str, Any]) -> str:
    try:
        toy.trainer(FreeScaleStrategy(**strategy_options), 2, max_epochs=1, **options).fit(toy.Model(), toy.loader())
    except ConfigurationError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("strategy_options", "options", "words"),
    [
        ({"embedding_optimizer": {"optimizer": "lion"}}, {}, ["embedding_optimizer", "'lion'", "rowwise_adagrad"]),
        ({"sharding": {"items": "row_wise"}}, {}, ["sharding", "'items'", "item, shop"]),
        ({"sharding": "diagonal"}, {}, ["sharding", "'diagonal'", "row_wise"]),
        ({"transport": "nccl"}, {}, ["transport='nccl'", "gloo"]),
        ({"model_averaging_period": 4}, {}, ["model_averaging_period=4"]),
        ({}, {"precision": "16-true"}, ["precision", "'16-true'", "bf16-mixed"]),
        ({}, {"precision": "64-true"}, ["precision", "'64-true'"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refused_with_a_reason(strategy_options: dict[str, Any], options: dict[str, Any], words: list[str]) -> None:
    for message in run_ranks(fit_refused, args=(strategy_options, options)):
        assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lars_sgd"}, "optimizer 'lars_sgd' is not supported; choose one of sgd, "),
        ({"weight_decay": 0.1}, "FBGEMM ignores the weight decay of 'rowwise_adagrad'. Set weight_decay_mode"),
        ({"optimizer": "sgd", "weight_decay": 0.1}, "FBGEMM ignores the weight decay of 'sgd'. Leave it out"),
        (
            {"weight_decay": 0.1, "weight_decay_mode": "l1"},
            "weight_decay_mode='l1' is unknown; choose one of l2, decoupled",
        ),
        ({"optimizer": "adam", "weight_decay_mode": "l2"}, "weight_decay_mode='l2' is unknown for 'adam'; known: lr"),
        ({"max_gradient": 0.0}, "max_gradient=0.0 must be positive"),
        ({"optimizer": "sgd", "momentum": 0.9}, "momentum=0.9 is unknown for 'sgd'"),
        ({"lr": -1.0}, "lr=-1.0 must not be negative"),
    ],
    ids=str,
)
def test_options_of_the_tables_are_refused_with_a_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        fused_params(options, torch.device("cpu"))


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="start_method='spawn'"):
        FreeScaleStrategy(start_method="spawn")

    with pytest.raises(ConfigurationError, match="fit_costs: True, False or a number of steps, not -1"):
        FreeScaleStrategy(fit_costs=-1)
    with pytest.raises(ConfigurationError, match="dedup='maybe' is unknown"):
        FreeScaleStrategy(dedup="maybe")
    with pytest.raises(ConfigurationError, match="wire='float8' is unknown; choose one of float32, bfloat16"):
        FreeScaleStrategy(wire={"rows": "float8"})
    with pytest.raises(ConfigurationError, match="wire: 'ids' is unknown; the keys are rows, gradients"):
        FreeScaleStrategy(wire={"ids": "bfloat16"})
    with pytest.raises(ConfigurationError, match="uneven='sometimes' is unknown"):
        FreeScaleStrategy(uneven="sometimes")
    for optimizer in ({"optimizer": "adam"}, {"optimizer": "sgd", "weight_decay": 0.1}):
        with pytest.raises(ConfigurationError, match="uneven='continue'"):
            FreeScaleStrategy(uneven="continue", embedding_optimizer=optimizer)
    with pytest.raises(ConfigurationError, match=r"precision='16-mixed'.*loss scaling"):
        refuse_inexact(None, "16-mixed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prioritize": "off"}, "prioritize='off': must be True, False or 'auto'"),
        ({"monitor": "off"}, "monitor='off': must be True or False"),
        ({"fit_costs": 0.5}, "fit_costs=0.5: must be True, False or a number of steps"),
        ({"host_copies": True}, "host_copies=True: must be None or fs.HostCopies"),
        ({"timeout": 0}, "timeout=datetime.timedelta(0): must be a positive number"),
        ({"buckets": 3}, "buckets=3: unknown option of the strategy"),
    ],
)
def test_values_that_no_option_has_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        FreeScaleStrategy(**options)
    assert str(refused.value).startswith(message)
    FreeScaleStrategy(bucket_cap_mb=10, process_group_backend="gloo", timeout=5, fit_costs=True)
