"""Rows that HSTU adds on CUDA: they change no output and no gradient. The same code runs here on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_freescale.batch.seq_batch import SeqBatch
from lightning_freescale.models import HSTU, even_rows
from tests.models.test_hstu import planted, tiny, training_batch


def outputs_and_gradients(model: HSTU, batch: SeqBatch, added: bool) -> dict[str, Tensor]:
    """Outputs of the layers, and the gradients of all parameters for a fixed gradient of the outputs."""
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "adds_rows", lambda batch: added)
        outputs = model(batch)
    outputs.backward(torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs))
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {"outputs": outputs.detach()} | found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{"bias": "relative"}, {"bias": "input"}, {"feed_forward": {"experts": 1}}])
def test_added_rows_change_nothing(options: dict, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(**options).train(training)
    batch = training_batch(planted(20)[0])
    given = outputs_and_gradients(model, batch, added=False)
    assert even_rows.even(len(batch.timestamps)) > len(batch.timestamps)
    more = outputs_and_gradients(model, batch, added=True)
    assert more.keys() == given.keys()
    for name, value in given.items():
        torch.testing.assert_close(more[name], value, rtol=1e-4, atol=1e-5, msg=name)

    # Negative control: rows that are inserted before those of the events would change them.
    monkeypatch.setattr(even_rows, "add_histories", shifted)
    wrong = outputs_and_gradients(model, batch, added=True)
    assert not torch.allclose(wrong["outputs"], given["outputs"], rtol=1e-3, atol=1e-3)


def shifted(offsets: Tensor, rows: int, total: int) -> Tensor:
    """Offsets that cut the rows at other places."""
    return torch.cat([offsets[:1], offsets[1:-1] + 1, offsets.new_tensor([total])])


def test_few_numbers_of_rows_and_few_added_rows() -> None:
    for lowest in (1 << 13, 1 << 16, 1 << 19):
        sizes = {even_rows.even(rows) for rows in range(lowest + 1, 2 * lowest + 1, 7)}
        assert len(sizes) <= even_rows.SIZES
    for rows in (*range(300), 12_345, 100_001, 1_000_000):
        assert rows <= even_rows.even(rows) < rows + max(64, rows / 60)
        assert even_rows.even(even_rows.even(rows)) == even_rows.even(rows)


def test_added_histories_are_short() -> None:
    total = even_rows.even(40_000)
    offsets = even_rows.add_histories(torch.tensor([0, 100, 39_990]), 39_990, total)
    assert offsets.tolist() == [0, 100, 39_990, *(min(end, total) for end in range(40_054, 40_054 + 64 * 8, 64))]
    assert even_rows.add_histories(torch.tensor([0, 64]), 64, 64).tolist() == [0, 64, 64]


def test_the_number_of_histories_follows_from_the_number_of_rows() -> None:
    for total in (128, 8192, 40_448, 149_504):
        fewest = max(rows for rows in range(total + 1) if even_rows.even(rows) < total) + 1
        found = [
            even_rows.add_rows(torch.tensor([0, rows]), torch.zeros(rows, dtype=torch.long))
            for rows in (fewest, fewest + 5, total)
        ]
        assert len({(len(offsets), len(times)) for offsets, times in found}) == 1
        for offsets, times in found:
            assert offsets[-1] == total == len(times)
            assert 0 <= offsets.diff().min() <= offsets[1:].diff().max() <= even_rows.ADDED_LENGTH


def test_a_cpu_and_experts_get_no_rows() -> None:
    model = tiny()
    assert not model.adds_rows(training_batch(planted(3)[0]))
    assert not tiny(feed_forward={"experts": 2}).adds_rows(training_batch(planted(3)[0]))
