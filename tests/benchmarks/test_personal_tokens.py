"""The benchmarks of personal tokens: what the data hide from recent events, what the trials see, and what is computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import personal_tokens, serving
from benchmarks.harness.long_history import trial
from benchmarks.harness.long_history.data import EarlyTastes, LongHistories
from benchmarks.harness.long_history.step_time import step_rows
from benchmarks.harness.tables import personal_tokens_block
from benchmarks.serving import CACHED, FULL, UNCACHED
from lightning_freescale.models import HSTU, PersonalTokens

TASTES = EarlyTastes(users=30, contexts=2, tastes=4, group=3, filler=20, early=6, visits=3, gap=8)
CPU = torch.device("cpu")


def test_recent_events_do_not_show_the_taste_and_early_ones_do() -> None:
    data, liked = TASTES.generate(), TASTES.contexts * TASTES.tastes * TASTES.group
    cut = PersonalTokens(1, 4, 4)
    for case, target, items in zip(data.cases, data.targets, data.items, strict=True):
        assert np.array_equal(items, case[:-1])
        assert case[-1] == liked + target // (TASTES.tastes * TASTES.group)  # the cue of the context
        past = int(cut.history_lengths(np.array([len(case)]))[0])
        assert (case[past:] >= liked).all()
        assert (case[: TASTES.early] < liked).all()
        same = case[(case < liked) & (case // (TASTES.tastes * TASTES.group) == case[-1] - liked)]
        assert (same // TASTES.group == target // TASTES.group).all()


def test_prepared_data_are_the_same_after_a_file(tmp_path: Path) -> None:
    data = TASTES.generate()
    data.save(tmp_path / "data.npz")
    loaded = LongHistories.load(tmp_path / "data.npz")
    assert all(np.array_equal(*pair) for pair in zip(data.items + data.cases, loaded.items + loaded.cases, strict=True))
    assert loaded.num_items == data.num_items
    assert np.array_equal(loaded.targets, data.targets)


def test_windows_have_every_event_and_end_with_the_recent_ones() -> None:
    cut = PersonalTokens(1, 3, 2)
    own = np.arange(20)
    found = trial.windows([own, np.arange(4)], cut)
    assert np.array_equal(np.concatenate(found[:-1]), own[1:]) or np.array_equal(np.concatenate(found[:-1]), own)
    assert found[-2].tolist() == [16, 17, 18, 19]
    assert max(map(len, found)) <= 5


@pytest.mark.parametrize("kind", ["full", "recent", "tokens"])
def test_predictions_see_what_they_should(kind: str) -> None:
    """Another early event changes the predictions of all but ``recent``. An older state changes those of ``tokens`` alone."""
    data = TASTES.generate()
    options = trial.TrialOptions(kind, PersonalTokens(2, 4, 4), 2, samples=4, negatives=4, model={"embedding_dim": 8})
    model, seconds = trial.train(data, options, 0, CPU)
    assert seconds > 0
    cases = [own.copy() for own in data.cases[:5]]
    past = options.cut.history_lengths(np.array([len(own) for own in cases]))
    before = trial.last_outputs(model, cases, past, options, CPU, dropped=False)
    whole = model(trial.make_batch(cases, CPU))
    ends = np.cumsum([len(own) for own in cases]) - 1
    assert torch.allclose(before, whole[ends], atol=1e-5) == (kind != "recent")
    for own in cases:
        own[0] = (own[0] + 1) % TASTES.num_items
    after = trial.last_outputs(model, cases, past, options, CPU, dropped=False)
    assert torch.equal(before, after) == (kind == "recent")
    found = trial.evaluate(model, data, options, CPU, age=4, least=4)
    assert 0 <= found["NDCG@10"] <= found["HR@10"] <= 1
    flops = trial.serving_flops(model, data, options)
    assert 0 < flops <= trial.serving_flops(model, data, trial.TrialOptions("full", options.cut, 2))


def test_the_share_of_the_gap_that_is_recovered() -> None:
    values = {"recent events only": [0.1, 0.3], "4 tokens": [0.5, 0.7], "full history": [0.7, 0.7]}
    flops = {"recent events only": 1.0, "4 tokens": 2.0, "full history": 8.0}
    rows = [
        {"data": "a", "variant": name, "seed": seed, "HR@10": value, "NDCG@10": 0.0, "cases": 5}
        | {"serving MFLOP": flops[name], "ages": [{"age": 4, "dropped": seed == 1, "HR@10": value}]}
        for name, found in values.items()
        for seed, value in enumerate(found)
    ]
    table = {row["variant"]: row for row in personal_tokens.quality_rows(rows)}
    assert table["4 tokens"]["recovered %"] == pytest.approx(80)
    assert table["4 tokens"]["noise"] == pytest.approx(0.1)
    assert table["4 tokens"]["serving FLOPs, % of full"] == 25
    assert personal_tokens.age_rows(rows[2:4])[0] == {"data": "a", "age": 4, "HR@10, kept": 0.5, "HR@10, dropped": 0.7}
    assert personal_tokens.quality_rows(rows[:1])[0]["recovered %"] is None
    without = [row for row in rows if (row["variant"], row["seed"]) != ("full history", 1)]
    one_seed = {row["variant"]: row for row in personal_tokens.quality_rows(without)}
    assert one_seed["4 tokens"]["recovered %"] == pytest.approx(100 * 0.4 / 0.6)  # of the seed that all have


def test_serving_computes_what_the_model_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PAST", 8)
    monkeypatch.setattr(serving, "RECENT", 4)
    shape = serving.ServingShape(1, 16, 2, 50, {2: 1})
    models = serving.make_models(shape, CPU)
    rows, work = serving.measure(models, shape, CPU, 2, 2, graph=False)
    assert not work  # only CUDA graphs have it
    assert [row["variant"] for row in rows] == [FULL, UNCACHED, CACHED] * 2
    assert all(row["p50 ms"] > 0 and row["calls"] == 2 for row in rows)
    assert rows[0]["ratio"] == 1
    request = serving.Request.make(2, 12, 50, seed=0)
    catalogue = models[FULL].embedding.embeddings["item"].weight.detach()
    served = serving.Served(models[FULL], None, catalogue, request, graph=False)
    served(request)
    model: HSTU = models[FULL]
    batch = trial.make_batch(list(request.items.view(2, 12).numpy()), CPU)
    batch.timestamps = request.timestamps
    assert torch.allclose(served.outputs, model(batch)[[11, 23]], atol=1e-6)


def test_the_page_has_the_device_work_of_a_result_that_has_it() -> None:
    head = {
        "benchmark": "serving",
        "machine": "NVIDIA H200",
        "command": "python -m benchmarks.serving",
        "date": "2026-11-16",
    }
    shape = {"model": {"layers": 8, "width": 512, "items": 100}, "events": {"history": 8, "recent": 4}}
    found = head | shape | {"serving": [{"batch": 1, "ratio": 0.5}]}
    work = {"device work": [{"batch": 1, "variant": FULL, "what": "outputs", "launches": 63.0, "busy ms": 0.39}]}
    with_work, without = (personal_tokens_block.serving({"r": result}) for result in (found | work, found))  # type: ignore[dict-item]
    assert "| 1 | full history | outputs | 63 | 0.39 |" in with_work
    assert "launches" not in without


def test_the_time_of_training_steps() -> None:
    rows = {row["variant"]: row for row in step_rows("cpu", quick=True, rounds=1)}
    assert rows["full history"]["of full"] == rows["full history"]["attention work of full"] == 1
    assert rows["4 tokens, fixed cut"]["attention work of full"] == pytest.approx((1028**2 + 260**2) / 1280**2)
    assert rows["4 segments of 4 tokens"]["attention work of full"] < rows["4 tokens"]["attention work of full"]
