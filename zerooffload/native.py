"""The native module, if it is there.

It is missing where the package was built without it (`-C cmake.define.ZEROOFFLOAD_NATIVE=OFF`) or on a
platform that it does not support; then the plain-Python fallbacks do the work. Nothing is logged here, and
importing it never fails: who chooses between the native code and its fallback tells about it, with `why_unavailable`.

Attributes
----------
module
    `zerooffload._native`; None if not `available`.
available : bool
    Whether it could be imported.
why_unavailable : str
    The reason if not, else "".
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from zerooffload.errors import ConfigError

if TYPE_CHECKING:
    # Typed as if it were always there, so that its users are checked against the stub: ask `available` first.
    from zerooffload import _native as module

    available: bool
    why_unavailable: str

__all__ = ["TARGET_VARIABLE", "active_target", "available", "module", "why_unavailable"]

TARGET_VARIABLE = "ZEROOFFLOAD_CPU_TARGET"
"""The environment variable that forces a CPU target."""
_NAME = "zerooffload._native"


def active_target() -> str:
    """The CPU target that kernels use, where the native module is available.

    Raises
    ------
    ConfigError
        If the environment forces one that this build or this CPU does not have. No kernel can be used then.
    """
    try:
        return module.active_target()
    except ValueError:
        raise ConfigError(
            f"{TARGET_VARIABLE}={os.environ.get(TARGET_VARIABLE)!r} is not a CPU target of this build and this CPU:"
            f" set it to one of {', '.join(module.supported_targets())}, or unset it, which takes the last of these"
        ) from None


def _load() -> tuple[object | None, str]:
    """Import the extension: (module, "") or (None, reason)."""
    try:
        return importlib.import_module(_NAME), ""
    except ModuleNotFoundError as error:
        if error.name == _NAME:
            return None, "this installation of zerooffload was built without its native module"
        return None, f"{_NAME} failed to import: {error}"
    except Exception as error:  # noqa: BLE001 - whatever a broken binary raises, the fallbacks still work
        return None, f"{_NAME} failed to import: {type(error).__name__}: {error}"


if not TYPE_CHECKING:
    module, why_unavailable = _load()
    available = module is not None
