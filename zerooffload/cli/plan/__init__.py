"""`zerooffload plan`: what a training will take on a machine, and with which settings."""

from zerooffload.cli.plan.command import Outputs, print_plan, print_zero_table, subject_of

__all__ = ["Outputs", "print_plan", "print_zero_table", "subject_of"]
