"""``wire``: rows and gradients travel as bfloat16, and are rounded as TorchRec's codecs round them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_freescale.embedding.wire import WireTypes, parse_wire, to_wire, torchrec_codecs
from lightning_freescale.transport import direct_calls
from tests.embedding.comparison import case, compare
from tests.embedding.training import SHARDINGS, Batches, build, make_schedule, random_batches, tables, train
from tests.ranks import run_ranks

WIRES = ("bfloat16", {"rows": "bfloat16"}, {"gradients": "bfloat16"})


def codecs(wire: Any) -> dict[str, Any]:
    return {"qcomm_codecs_registry": torchrec_codecs(parse_wire(wire))}


@pytest.mark.parametrize("world", [1, 3])
def test_prioritized_equals_torchrec_with_its_codecs(world: int) -> None:
    cases = [
        case(world, kind=kind, optimizer="rowwise_adagrad", seed=seed, options=codecs(wire))
        for seed, kind in enumerate(SHARDINGS)
        for wire in WIRES
    ]
    for result in run_ranks(compare, world, args=(world, cases)):
        assert result == [True] * len(cases)


def own_rows_unrounded(schedule: Any) -> None:
    """Rows that stay on their rank keep all bits, as if only the network rounded."""
    exchange = schedule.modules[0].exchange
    exchange.wire = WireTypes()
    exchange.gradients._wire = torch.float32


def test_the_comparison_detects_rows_that_are_not_rounded() -> None:
    cases = [
        case(2, kind="row_wise", optimizer="sgd", options=codecs("bfloat16"), sabotage=sabotage)
        for sabotage in (own_rows_unrounded, None)
    ]
    results = run_ranks(compare, 2, args=(2, cases))
    assert not all(result[0] for result in results)
    assert all(result[1] for result in results)


def _bytes_and_error(rank: int, batches: list[Batches]) -> tuple[list[int], float, float]:
    """Bytes of rows and gradients that leave the rank in float32 and in bfloat16; the error of the losses; of the weights."""
    dist.init_process_group("gloo")
    sent, losses, found = [], [], []
    places = (
        (dist, "all_to_all_single"),
        (direct_calls, "start_all_to_all"),
    )  # of TorchRec's first step, and of the others
    for wire in ("float32", "bfloat16"):
        module = build("row_wise", "sgd", len(batches), **codecs(wire))
        schedule = make_schedule(module)
        total = 0

        def counted(
            issue: Any, output: Any, input: Any, *args: Any, **options: Any
        ) -> Any:  # TorchRec names the arguments
            nonlocal total
            total += input.nbytes if input.is_floating_point() else 0
            return issue(output, input, *args, **options)

        with ExitStack() as stack:
            for owner, name in places:
                stack.enter_context(patch.object(owner, name, partial(counted, getattr(owner, name))))
            losses.append(torch.tensor(train(module, batches[rank], schedule)))
        sent.append(total)
        found.append(tables(module))
    apart = max(float((found[0][key] - found[1][key]).abs().max() / found[0][key].abs().max()) for key in found[0])
    return sent, float((losses[1] / losses[0] - 1).abs().max()), apart


def test_half_of_the_bytes_travel_and_errors_stay_small() -> None:
    batches = [random_batches(rank, 8, 3, lambda r, s: 6) for rank in range(2)]
    for (full, half), loss_error, weight_error in run_ranks(_bytes_and_error, args=(batches,)):
        assert half == pytest.approx(full / 2, abs=1)
        assert 0 < loss_error < 0.01
        assert 0 < weight_error < 0.02


def test_rounding() -> None:
    values = torch.tensor([1.0, 1 + 2**-8, -3e38, torch.inf, torch.nan])
    rounded = to_wire(values, torch.bfloat16)
    assert rounded[:1].tolist() == [1.0]
    assert torch.isfinite(rounded[:4]).all()
    assert torch.isnan(rounded[4])
    random = torch.randn(10_000)
    assert ((to_wire(random, torch.bfloat16).float() - random).abs() <= 2**-8 * random.abs()).all()
    assert to_wire(random, torch.float32) is random
