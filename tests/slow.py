"""Cases of a parametrized test that are further combinations, or take long: only ``make test-all`` runs them."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """The values of one case, which has the mark ``slow``."""
    return pytest.param(*values, marks=pytest.mark.slow)
