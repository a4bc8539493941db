"""Ids that are counted in host memory: the exchange gets the numbers that it would count itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist

from lightning_freescale.embedding import owner_counts
from lightning_freescale.embedding.id_exchange import IdsByOwner, RowWiseIds
from lightning_freescale.embedding.owner_counts import KnownCounts
from tests.embedding.training import ROWS, build, build_bags, random_batches, to_kjt
from tests.ranks import run_ranks

FEATURE_ROWS = {"a": ROWS["one"], "b": ROWS["two"], "c": ROWS["two"]}


WERE_KNOWN: list[bool] = []  # of every row-wise exchange: whether the counts were known before


def note(send: Any, divided: IdsByOwner) -> Any:
    """Compare the counts, if they are known, with the ids, and exchange these."""
    known = divided.by_owner
    WERE_KNOWN.append(known is not None)
    assert (
        known is None or known == divided.lengths.view(len(known), len(divided.keys) * divided.samples).sum(1).tolist()
    )
    return send(divided)


def noted(forward: Any, watched: Any) -> Any:
    """TorchRec's exchange ``watched`` does not know the counts."""

    def noting(self: Any, features: KeyedJaggedTensor) -> Any:
        if self is watched:
            WERE_KNOWN.append(False)
        return forward(self, features)

    return noting


def ids_that_arrive(input_dist: Any, module: Any, kjt: KeyedJaggedTensor) -> list[Tensor]:
    WERE_KNOWN.clear()
    return [part.values() for part in input_dist(module.create_context(), kjt).wait().wait()]


def check_counts(rank: int, world: int, bags: bool) -> None:
    dist.init_process_group("gloo")
    module = (build_bags if bags else build)("mixed", "sgd", world)  # one table is row-wise, the other one is not
    known = KnownCounts(module)
    batches = [to_kjt(batch) for batch in random_batches(rank, 4, 5, lambda rank, step: 3 * step if rank else 4)]
    ids_that_arrive(module.input_dist, module, batches[0])  # TorchRec makes its exchanges here
    (row_wise,) = (part for part in module._input_dists if isinstance(part, RwSparseFeaturesDist))
    kind = type(row_wise)
    kind.forward = noted(kind.forward, row_wise)  # The counts are installed above both.
    send = RowWiseIds.send
    RowWiseIds.send = lambda self, ids, _: note(functools.partial(send, self), ids)  # type: ignore[method-assign]
    ids_that_arrive(KnownCounts(module).input_dist, module, batches[0])  # as in an earlier fit
    for kjt in batches:
        owner_counts.attach(kjt, kjt, FEATURE_ROWS, world)
        arrived = ids_that_arrive(known.input_dist, module, kjt)
        assert WERE_KNOWN == [True]
        plain = ids_that_arrive(module.input_dist, module, kjt)
        assert WERE_KNOWN == [False]
        assert row_wise.forward.args[0].func is kind.forward  # TorchRec's, not the wrapper of the earlier fit
        assert all(torch.equal(a, b) for a, b in zip(arrived, plain, strict=True))
    # Ids that were changed in place, tensors without counts, and counts of other tables are counted on the device.
    batches[0].values().clamp_(max=1)
    bare = to_kjt([[[1], [2], [3]]])
    other = to_kjt([[[1], [2], [3]]])
    owner_counts.attach(other, other, {"a": 4000, "b": 24, "c": 24}, world)
    for kjt in (batches[0], bare, other):
        ids_that_arrive(known.input_dist, module, kjt)
        assert WERE_KNOWN == [False]
    dist.barrier()


def test_the_exchange_gets_the_counts_that_it_would_count() -> None:
    run_ranks(check_counts, 2, (2, False))
    run_ranks(check_counts, 2, (2, True))


def test_counts_by_owner() -> None:
    kjt = KeyedJaggedTensor(["x", "y"], torch.tensor([0, 9, 3, 4, 4, 2]), lengths=torch.tensor([2, 1, 3, 0]))
    counts, blocks = owner_counts.count(kjt, {"x": 10, "y": 5}, 3)
    assert counts == {"x": [2, 0, 1], "y": [0, 1, 2]}
    assert blocks == {"x": 4, "y": 2}
    assert owner_counts.count(kjt, {"y": 5}, 1)[0] == {"y": [3]}


def test_comparisons_count_what_divisions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, 103, (500,), generator=torch.Generator().manual_seed(0))
    kjt = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([200, 0, 300, 0]))
    for ranks in (1, 2, 3, 7, 8, 9, 40):
        found = []
        for compared in (0, 100):
            monkeypatch.setattr(owner_counts, "COMPARED_RANKS", compared)
            found.append(owner_counts.count(kjt, {"a": 103, "b": 103}, ranks)[0])
        assert found[0] == found[1]
        assert sum(found[0]["b"]) == 300
        assert all(len(counts) == ranks for counts in found[1].values())
