"""A fixture for tests that count what an update reads."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings as short as work needs, so that an update reads nearly everything."""
    monkeypatch.setattr("zerooffload.planner.admission.AnnouncedPlan.with_cache", lambda plan: plan)
