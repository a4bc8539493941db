"""The page about the exchange has the table that the code's decisions make."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_freescale.embedding import support, table_optimizer
from lightning_freescale.strategy import exchange_table

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "exchange.md"


@pytest.mark.parametrize("name", ["exchange.md", "options.md"])
def test_the_pages_are_up_to_date(name: str) -> None:
    """If this fails, run ``python -m lightning_freescale.strategy.exchange_table``."""
    text = (DOCS / name).read_text()
    assert exchange_table.with_tables(text) == text


def test_a_changed_decision_changes_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    text, options = PAGE.read_text(), (DOCS / "options.md").read_text()
    monkeypatch.setattr(support, "PRIORITIZED_SHARDINGS", ("table_wise",))
    monkeypatch.setattr(table_optimizer, "MOMENT_OPTIMIZERS", ("adam",))
    assert exchange_table.with_tables(text) != text
    assert exchange_table.with_tables(options) != options


def test_every_reason_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert all(reason in text for reason in support.FOUND_IN_TRAINING)
    assert len({row.subject + row.reason for row in exchange_table.decisions()}) == len(exchange_table.decisions())
