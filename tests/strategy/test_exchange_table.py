"""The page about the exchange has the table that the code's decisions make."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_freescale.embedding import support
from lightning_freescale.strategy import exchange_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exchange.md"


def test_the_page_is_up_to_date() -> None:
    """If this fails, run ``python -m lightning_freescale.strategy.exchange_table``."""
    text = PAGE.read_text()
    assert exchange_table.with_table(text) == text


def test_a_changed_decision_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    monkeypatch.setattr(support, "PRIORITIZED_SHARDINGS", ("table_wise",))
    assert exchange_table.with_table(text) != text


def test_every_reason_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert all(reason in text for reason in support.FOUND_IN_TRAINING)
    assert len({row.subject + row.reason for row in exchange_table.decisions()}) == len(exchange_table.decisions())
