"""Settings as TOML, as recipes are written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_document(values: Mapping[str, Mapping[str, Any]]) -> str:
    """A recipe's sections."""
    return "\n".join("\n".join(toml_table(name, section)) + "\n" for name, section in values.items())


def toml_table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table. Its plain values first: what follows a table's head is that table's."""
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping) and value}
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping) and value is not None}
    if plain or not tables:
        yield f"[{name}]"
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    for number, (key, table) in enumerate(tables.items()):
        if plain or number:
            yield ""
        yield from toml_table(f"{name}.{_key(key)}", table)


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
