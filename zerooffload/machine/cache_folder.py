"""Where this user's caches are."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where what can be made again is kept: `zerooffload` in $XDG_CACHE_HOME or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification ignores relative paths there.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "zerooffload"
