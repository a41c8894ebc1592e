"""The page of what works with what is that of the cells that are tested."""

from __future__ import annotations

from support.compatibility import PAGE, page


def test_the_page_is_up_to_date() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(), "write it again: PYTHONPATH=tests python -P tests/support/compatibility.py"
