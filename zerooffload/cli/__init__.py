"""The command line. Commands import what they need when they run, so that help is quick."""

from zerooffload.cli.app import main

__all__ = ["main"]
