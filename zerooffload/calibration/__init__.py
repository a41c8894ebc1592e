"""How fast this machine is: measured in under a minute, kept in a file, and known again."""

from zerooffload.calibration.effort import Effort
from zerooffload.calibration.measure import calibrate
from zerooffload.calibration.profile import figure_of
from zerooffload.calibration.remembered import RememberedMachine, machine_file, remembered_machine

__all__ = ["Effort", "RememberedMachine", "calibrate", "figure_of", "machine_file", "remembered_machine"]
