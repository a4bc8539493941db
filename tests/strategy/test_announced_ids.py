"""A training whose headers announce the numbers of ids: the same training, without transfers of sizes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_freescale import FreeScaleStrategy
from lightning_freescale.embedding import id_exchange
from lightning_freescale.strategy.pipeline import BatchPipeline
from tests import toy
from tests.ranks import run_ranks

Trained = tuple[list[float], dict[str, Tensor], list[bool]]


def fit(rank: int, announced: bool, **options: Any) -> Trained:
    """Losses, weights, and for each exchange of row-wise ids whether the numbers of ids were announced.

    The headers of a CPU training announce nothing, because user code may change the ids of a batch there.
    """
    known: list[bool] = []
    copies, send = BatchPipeline._copies_ids, id_exchange.RowWiseIds.send
    BatchPipeline._copies_ids = lambda self: announced  # type: ignore[method-assign]

    def noting(self: Any, divided: Any, sizes: Any = None) -> Any:
        known.append(sizes is not None)
        return send(self, divided, sizes)

    id_exchange.RowWiseIds.send = noting  # type: ignore[method-assign]
    pl.seed_everything(1, verbose=False)
    model = toy.Model(bags=options.pop("bags", False))
    tables = {"optimizer": "rowwise_adagrad", "lr": 0.1}
    strategy = FreeScaleStrategy(sharding="row_wise", prioritize=True, embedding_optimizer=tables, **options)
    # The first rank has more batches with uneven="continue".
    data = toy.loader(24 if rank == 0 and "uneven" in options else 20, 2, shuffle=False)
    toy.trainer(strategy, 2, max_epochs=2, use_distributed_sampler="uneven" not in options).fit(model, data)
    BatchPipeline._copies_ids, id_exchange.RowWiseIds.send = copies, send  # type: ignore[method-assign]
    return model.losses, toy.weights(model), known


def fits(rank: int, options: dict[str, Any]) -> tuple[Trained, Trained]:
    return fit(rank, True, **options), fit(rank, False, **options)


def check(options: dict[str, Any]) -> None:
    for announced, plain in run_ranks(fits, 2, (options,)):
        assert announced[0] == plain[0]
        assert toy.same(announced[1], plain[1])
        assert not any(plain[2])
        assert sum(announced[2]) > len(announced[2]) // 2
        if options.get("uneven"):
            assert not all(announced[2])  # A rank that repeats its last batch announces nothing.


def test_announced_numbers_change_no_training() -> None:
    check({"balance": "off"})
    check({"balance": "fixed", "bags": True})


def test_a_rank_without_data_announces_nothing() -> None:
    check({"balance": "off", "uneven": "continue"})
