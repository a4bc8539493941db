"""HSTU with tables sharded over two ranks: training, and validation over a catalogue of which each rank holds a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_freescale import FreeScaleStrategy
from tests import toy
from tests.models.cases import make_batch
from tests.models.test_hstu import loader, planted, tiny, trainer, training_batch
from tests.ranks import run_ranks


def fit(
    rank: int, sharding: str, prioritize: bool, bias: str = "relative"
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Train on this rank's half of the samples.

    Returns:
        The results of the last validation and of a test on the same samples, and the unsharded weights.
    """
    pl.seed_everything(0, verbose=False)
    histories, _ = planted()
    held_out, targets = planted(40, seed=1)
    mine = slice(rank, None, 2)
    batches = [training_batch(histories[i : i + 16][mine], seed=i + rank) for i in range(0, 64, 16)]
    model = tiny(lr=1e-2, meta_tables=True, bias=bias)
    strategy = FreeScaleStrategy(sharding=sharding, prioritize=prioritize, balance="off")
    trained = toy.trainer(
        strategy, 2, max_epochs=8, check_val_every_n_epoch=4, limit_val_batches=1, use_distributed_sampler=False
    )
    trained.fit(model, loader(batches), loader([make_batch(held_out[mine], targets=targets[mine])]))
    logged = {name: float(value) for name, value in trained.callback_metrics.items() if name.startswith("val/")}
    weights = toy.weights(model)
    tested = trained.test(model, loader([make_batch(held_out[mine], targets=targets[mine])]), verbose=False)[0]
    return logged | tested, weights


CASES: list[tuple] = [  # sharding, prioritize, bias of the model
    ("row_wise", True),
    ("row_wise", True, "input"),
    ("table_wise", True),
    ("column_wise", False),
]


def fit_all(rank: int) -> list[tuple[dict[str, float], dict[str, Tensor]]]:
    return [fit(rank, *case) for case in CASES]


@pytest.fixture(scope="module")
def results() -> dict[tuple, list[tuple[dict[str, float], dict[str, Tensor]]]]:
    """The result of :func:`fit` on both ranks, by case. The same two ranks train all cases."""
    return dict(zip(CASES, map(list, zip(*run_ranks(fit_all), strict=True)), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_rank_the_whole_catalogue(case: tuple, results: dict[Any, Any], tmp_path: Path) -> None:
    (logged, weights), (also_logged, _) = results[case]
    assert logged == also_logged
    assert logged["val/hr@10"] > 0.9

    rows = weights["embedding.embeddings.item.weight"]
    assert len(rows.unique(dim=0)) == len(rows)  # the shards are initialized with different random numbers
    unsharded = tiny(bias=case[2] if len(case) > 2 else "relative")
    unsharded.load_state_dict(weights)
    held_out, targets = planted(40, seed=1)
    whole = [make_batch(held_out, targets=targets)]
    alone = trainer(tmp_path).validate(unsharded, loader(whole), verbose=False)[0]
    alone |= trainer(tmp_path).test(unsharded, loader(whole), verbose=False)[0]
    assert {name.split("/")[0] for name in logged} == {"val", "test"}
    assert logged == pytest.approx(alone, rel=1e-4)
    with torch.no_grad():  # negative control: other weights give another ranking
        unsharded.embedding.embeddings["item"].weight.normal_()
    assert trainer(tmp_path).validate(unsharded, loader(whole), verbose=False)[0] != pytest.approx(alone, rel=1e-4)
