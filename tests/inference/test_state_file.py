"""States of users: as good as the history, saved and loaded with ids, refused for another model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_freescale.data.samples import SampleArrays
from lightning_freescale.inference import Recommender, StoredStates, load_states, save_states
from lightning_freescale.inference.state_file import DIGEST_BYTES, join_states
from lightning_freescale.runtime.errors import InputError
from tests.inference.trained import CUT, USERS, Trained, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("states"), tokens=True)


@pytest.fixture(scope="module")
def recommender(trained: Trained) -> Recommender:
    return Recommender.load(trained.exported)


@pytest.fixture(scope="module")
def samples(trained: Trained, recommender: Recommender) -> SampleArrays:
    """All users of the file as one batch."""
    histories = recommender.read_events(trained.events, cache_dir=trained.events.parent)
    (found,) = recommender.batches(histories, USERS)
    return found


def stored(recommender: Recommender, samples: SampleArrays) -> StoredStates:
    users = np.array([f"user-{number}" for number in samples.users])
    digests = [bytes([number]) * DIGEST_BYTES for number in range(USERS)]
    return StoredStates(users, np.arange(USERS, dtype=np.int64), digests, recommender.compress(samples))


def test_states_replace_the_history(recommender: Recommender, samples: SampleArrays) -> None:
    states = recommender.compress(samples)
    assert states.lengths.tolist() == CUT.history_lengths(samples.lengths).tolist()
    assert int(states.lengths.max()) > int(states.lengths.min()) == 0
    whole, cached = recommender.rank(samples, 5), recommender.rank(samples, 5, states=states)
    assert torch.equal(whole.rows, cached.rows)
    assert torch.allclose(whole.scores, cached.scores, rtol=0, atol=1e-6)
    # Negative control: the states of other users give other scores.
    others = states.select(torch.arange(USERS).flip(0))._replace(lengths=states.lengths)
    assert not torch.allclose(whole.scores, recommender.rank(samples, 5, states=others).scores, rtol=0, atol=1e-3)


def test_states_survive_a_file(recommender: Recommender, samples: SampleArrays, tmp_path: Path) -> None:
    before = stored(recommender, samples)
    save_states(tmp_path / "new" / "states.parquet", before, recommender.fingerprint)
    after = load_states(tmp_path / "new" / "states.parquet", recommender.fingerprint)
    assert after.users.tolist() == before.users.tolist()
    assert after.first.tolist() == before.first.tolist()
    assert after.digests == before.digests
    for name, tensor in before.states.tensors().items():
        assert torch.equal(after.states.tensors()[name], tensor), name
    assert torch.equal(
        recommender.rank(samples, 5, states=after.states).scores,
        recommender.rank(samples, 5, states=before.states).scores,
    )
    numbered = before._replace(users=np.arange(USERS))
    save_states(tmp_path / "numbers.parquet", numbered, recommender.fingerprint)
    loaded = load_states(tmp_path / "numbers.parquet", recommender.fingerprint)
    assert loaded.users.dtype == np.int64
    assert loaded.users.tolist() == list(range(USERS))


def test_joined_states_are_those_of_their_parts(recommender: Recommender, samples: SampleArrays) -> None:
    states = recommender.compress(samples)
    parts = [states.select(torch.tensor([user])) for user in range(USERS)]
    joined = join_states(parts).tensors()
    assert all(torch.equal(joined[name], tensor) for name, tensor in states.tensors().items())


def test_states_without_users_survive_a_file(recommender: Recommender, samples: SampleArrays, tmp_path: Path) -> None:
    states = recommender.compress(samples).select(torch.tensor([], dtype=torch.int64))
    nobody = StoredStates(np.array([], dtype=str), np.array([], dtype=np.int64), [], states)
    save_states(tmp_path / "nobody.parquet", nobody, recommender.fingerprint)
    assert len(load_states(tmp_path / "nobody.parquet", recommender.fingerprint).users) == 0


def test_files_that_do_not_fit_are_refused(
    recommender: Recommender, samples: SampleArrays, trained: Trained, tmp_path: Path
) -> None:
    path = tmp_path / "states.parquet"
    save_states(path, stored(recommender, samples), recommender.fingerprint)
    other = Recommender.load(train(tmp_path, tokens=True, seed=2).exported)
    with pytest.raises(InputError, match=r"states\.parquet: fingerprint '.*' is of another model than"):
        load_states(path, other.fingerprint)
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["keys.1"]), tmp_path / "short.parquet")
    with pytest.raises(InputError, match=r"short\.parquet: incomplete, because it has no column 'keys\.1'"):
        load_states(tmp_path / "short.parquet", recommender.fingerprint)
    pq.write_table(pa.table({"user": ["a"]}), tmp_path / "foreign.parquet")
    with pytest.raises(InputError, match=r"foreign\.parquet: it does not hold states of users"):
        load_states(tmp_path / "foreign.parquet", recommender.fingerprint)
    (tmp_path / "cut.parquet").write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"cut\.parquet: it cannot be read as states of users"):
        load_states(tmp_path / "cut.parquet", recommender.fingerprint)


def test_states_that_do_not_fit_the_batch_are_refused(recommender: Recommender, samples: SampleArrays) -> None:
    states = recommender.compress(samples)
    with pytest.raises(InputError, match="states: of 2 users, but there are 12 samples"):
        recommender.rank(samples, 5, states=states.select(torch.tensor([0, 1])))
    with pytest.raises(InputError, match="sample 0 stands for 3 events, but the sample has 3"):
        recommender.rank(samples, 5, states=states._replace(lengths=torch.from_numpy(samples.lengths)))
