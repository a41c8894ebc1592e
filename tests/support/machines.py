"""Two machines: network namespaces of this one, joined by a cable, or just two starts on the loopback interface."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Machine:
    """Where commands run: with `prefix` before them they see a network in which the machine has this address."""

    prefix: tuple[str, ...]
    address: str
    interface: str


def on_loopback() -> list[Machine]:
    """Two that share everything."""
    return [Machine((), "127.0.0.1", "lo")] * 2


@contextmanager
def in_namespaces() -> Iterator[list[Machine]]:
    """Two whose only network is between them; skips the test where that is not permitted."""
    names = [f"zo-{os.getpid()}-{number}" for number in range(2)]
    cables = [f"zo{os.getpid()}{end}" for end in "ab"]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
            for number, (name, cable) in enumerate(zip(names, cables, strict=True)):
                _ip("link", "set", cable, "netns", name)
                _ip("-n", name, "address", "add", f"10.213.0.{number + 1}/24", "dev", cable)
                for interface in ("lo", cable):
                    _ip("-n", name, "link", "set", interface, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
        yield [
            Machine(("ip", "netns", "exec", name), f"10.213.0.{number + 1}", cable)
            for number, (name, cable) in enumerate(zip(names, cables, strict=True))
        ]
    finally:
        for name in names:
            # A cable goes with either of its ends.
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
