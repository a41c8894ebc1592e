"""A finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How good a finding is."""

    OK = "ok"
    NOTE = "note"
    """Works, and could be better."""
    PROBLEM = "problem"
    """Does not work."""


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes
    ----------
    subject : str
        What was looked at.
    value : str
        What was found.
    verdict : Verdict
    advice : str
        What to do; "" where there is nothing to.
    """

    subject: str
    value: str
    verdict: Verdict = Verdict.OK
    advice: str = ""
