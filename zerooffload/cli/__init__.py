"""The command line. Commands import what they need when they run, so that help is quick."""

import os

from zerooffload.cli.app import main

__all__ = ["main"]

# OpenMP reads it when torch is loaded, which comes later. Left alone, torch's threads spin while they wait for one
# another or for the next operation, and take the cores from I/O, from the optimizer's kernel and from other processes:
# a step on busy cores then takes twice as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
