"""The ids behind the rows of a model: in checkpoints, and for other files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

from lightning_freescale.data import Histories, SeqRecDataModule
from lightning_freescale.data.catalogue import Catalogue
from lightning_freescale.runtime.errors import InputError


def histories(item_ids: list, users: list[list[int]], genres: list[str] | None = None) -> Histories:
    """Histories of the users ``u0``, ``u1``, ...; each is a list of codes."""
    items = np.array([item for user in users for item in user], dtype=np.int64)
    return Histories(
        items=items,
        timestamps=np.arange(len(items)),
        offsets=np.cumsum([0, *map(len, users)]),
        item_ids=np.array(item_ids),
        user_ids=np.array([f"u{at}" for at in range(len(users))]),
        features={} if genres is None else {"genre": items % len(genres)},
        feature_values={} if genres is None else {"genre": np.array(genres)},
    )


@pytest.mark.parametrize("ids", [[3, 7, 11], ["a", "bé", "日本"], [0.5, 1.5, 2.5]])
def test_a_checkpoint_keeps_all_kinds_of_ids(ids: list) -> None:
    file = io.BytesIO()
    torch.save(Catalogue(np.array(ids), {"genre": np.array(["", "x"])}).state_dict(), file)
    file.seek(0)
    back = Catalogue.from_state_dict(torch.load(file, weights_only=True))
    assert back.item_ids.tolist() == ids
    assert back.item_ids.dtype.kind == np.array(ids).dtype.kind
    assert back.feature_values["genre"].tolist() == ["", "x"]


def test_another_file_gets_the_rows_of_the_catalogue() -> None:
    known = Catalogue(np.array([10, 20, 30]), {"genre": np.array(["a", "b"])})
    other = histories([5, 20, 30, 40], [[1, 2, 1], [0, 3], [2, 0, 2]], genres=["b", "c"])
    recoded, left_out = known.recode(other)
    # Items 20 and 30 have the rows 1 and 2. Their genres are c, b, c in the first history: c is not known.
    assert recoded.items.tolist() == [2, 2, 2]
    assert recoded.offsets.tolist() == [0, 1, 3]
    assert recoded.user_ids.tolist() == ["u0", "u2"]
    assert recoded.features["genre"].tolist() == [1, 1, 1]
    assert recoded.timestamps.tolist() == [1, 5, 7]
    assert left_out == 5
    assert known.recode(other, min_events=2)[0].user_ids.tolist() == ["u2"]


def test_numbers_and_text_are_compared_as_text() -> None:
    recoded, left_out = Catalogue(np.array([9, 10, 200])).recode(histories(["10", "200", "9", "x"], [[0, 1, 2, 3]]))
    assert recoded.items.tolist() == [1, 2, 0]
    assert left_out == 1


def test_files_that_do_not_fit_are_named() -> None:
    with pytest.raises(InputError, match="genre: the model needs this feature"):
        Catalogue(np.array([1]), {"genre": np.array(["a"])}).recode(histories([1], [[0]]))
    with pytest.raises(InputError, match="no user has 2 events"):
        Catalogue(np.array([1, 2])).recode(histories([2, 3], [[0, 1], [1]]), min_events=2)


def module(item_ids: list, genres: list[str] | None = None, **options: Any) -> SeqRecDataModule:
    return SeqRecDataModule(histories(item_ids, [[0, 1, 2, 0]], genres), batch_size=1, max_history=4, **options)


def test_a_checkpoint_of_another_catalogue_is_refused() -> None:
    state = module(["a", "b", "c"]).state_dict()
    module(["a", "b", "c"]).load_state_dict(state)
    with pytest.raises(InputError, match=r"items: row 2 is .*'c'.* and .*'d'"):
        module(["a", "b", "d"]).load_state_dict(state)
    with pytest.raises(InputError, match="items: 3 and 4 values"):
        module(["a", "b", "c", "d"]).load_state_dict(state)
    with pytest.raises(InputError, match="the features are"):
        module(["a", "b", "c"], genres=["x"]).load_state_dict(state)
    module(["a", "b", "d"]).load_state_dict({})  # a checkpoint of an earlier version does not say


def test_raw_ids_resume_with_a_catalogue_that_has_changed() -> None:
    """The table knows its ids, so only the features must be the same."""
    state = module(["a", "b", "c"], ["x", "y"], ids="raw").state_dict()
    module(["a", "c", "new"], ["x", "y"], ids="raw").load_state_dict(state)
    with pytest.raises(InputError, match="genre: row 1 is"):
        module(["a", "b", "c"], ["x", "z"], ids="raw").load_state_dict(state)
    with pytest.raises(InputError, match="ids: 'dense', but the checkpoint was trained with 'raw'"):
        module(["a", "b", "c"], ["x", "y"]).load_state_dict(state)
