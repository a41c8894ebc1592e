"""The [offload] section of a recipe that a plan comes to, as TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerooffload.config import OffloadConfig, TierName
from zerooffload.planner.plan import Plan

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def offload_section(config: OffloadConfig, plan: Plan) -> str:
    """What the user has set and what the plan chose; a run of it is the run that was planned."""
    values = {**config.model_dump(include=config.model_fields_set), **plan.settings}
    if not (plan.announced.planned_bytes(TierName.NVME) or config.keeps_activations_on_nvme):
        values.pop("nvme_paths", None)
    return "\n".join(_table("offload", values)) + "\n"


def _table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Its plain values first: what follows a table's head is that table's."""
    yield f"[{name}]"
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    for key, value in values.items():
        if key not in tables and value is not None:
            yield f"{_key(key)} = {_value(value)}"
    for key, table in tables.items():
        if table:
            yield ""
            yield from _table(f"{name}.{_key(key)}", table)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    return _text(str(value) if isinstance(value, str | Path) else repr(value))


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which JSON lets stand.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
