"""The first row of an id depends on the seed, the table and the id alone."""

from __future__ import annotations

import functools

import pytest
import torch
from torchrec import EmbeddingConfig

from lightning_freescale.embedding.zero_collision.fresh_rows import row_draw
from lightning_freescale.runtime.errors import ConfigurationError


def config(name: str = "item", **options: object) -> EmbeddingConfig:
    return EmbeddingConfig(name=name, embedding_dim=12, num_embeddings=100, feature_names=["f"], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("std", [None, 0.02])
def test_company_does_not_matter(std: float | None) -> None:
    draw, ids = row_draw(config(), 0, std), torch.randint(0, 2**63 - 1, (1001,))
    rows = draw(ids)
    for at in (0, 7, 500, 1000):
        assert torch.equal(draw(ids[at : at + 1])[0], rows[at])
    assert torch.equal(draw(ids.flip(0)), rows.flip(0))


def test_seed_table_and_id_matter() -> None:
    ids = torch.arange(100)
    rows = row_draw(config(), 0, None)(ids)
    assert len(rows.unique()) > 0.99 * rows.numel()
    for other in (row_draw(config(), 1, None), row_draw(config("shop"), 0, None)):
        assert not torch.isin(other(ids), rows).any()


def test_distributions() -> None:
    ids = torch.arange(20_000)
    uniform = row_draw(config(), 0, None)(ids)  # TorchRec's default: up to 1 / sqrt(rows)
    assert -0.1 <= uniform.min() < -0.0999
    assert 0.0999 < uniform.max() <= 0.1
    assert uniform.mean().abs() < 1e-3
    bell = row_draw(config(), 0, 0.02)(ids)
    assert bell.std() == pytest.approx(0.02, rel=0.01)
    assert bell.mean().abs() < 1e-4
    assert ((bell.abs() < 0.02).float().mean() - 0.683).abs() < 0.01  # as of a normal distribution
    assert torch.corrcoef(bell.T).fill_diagonal_(0).abs().max() < 0.05


def test_init_functions() -> None:
    normal = row_draw(config(init_fn=functools.partial(torch.nn.init.normal_, std=0.5)), 0, None)
    assert normal.std == 0.5
    with pytest.raises(ConfigurationError, match=r"table 'item' has an init_fn.*std="):
        row_draw(config(init_fn=lambda weight: weight.fill_(1.0)), 0, None)
    assert row_draw(config(init_fn=lambda weight: weight.fill_(1.0)), 0, 0.1).std == 0.1
