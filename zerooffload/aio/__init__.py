"""Bytes to and from files, asynchronously, through an engine that is chosen by probing and named."""

from zerooffload.aio.api import Engine, OpenFile
from zerooffload.aio.choose import ChosenEngine, choose_engine, path_speeds

__all__ = ["ChosenEngine", "Engine", "OpenFile", "choose_engine", "path_speeds"]
