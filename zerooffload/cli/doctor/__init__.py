"""`zerooffload doctor`: what this machine offers, what is in use and why, and what to do about it."""

from zerooffload.cli.doctor.show import print_findings

__all__ = ["print_findings"]
