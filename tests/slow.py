"""Marks cases of a parametrized test that only ``make test-all`` runs: they take long, or are further combinations of options."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """The values of one case, which has the mark ``slow``."""
    return pytest.param(*values, marks=pytest.mark.slow)
