"""Bytes and durations as people write and read them. GiB is 2^30 bytes, GB is 10^9."""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNIT_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*")


def parse_bytes(value: int | str) -> int:
    """Bytes from an integer or a text such as "24GiB", "1.5 GB" or "512MiB".

    Raises
    ------
    ValueError
        If the text has no known unit, or the value is negative. A bare number in a text is refused: it has no unit.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(  # noqa: TRY004 - pydantic reports value errors, and lets type errors through
            f"expected bytes as an integer or a text such as '24GiB', got {value!r}"
        )
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"expected a number of bytes >= 0, got {value}")
        return value
    match = _QUANTITY.fullmatch(value)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _UNIT_BYTES:
        raise ValueError(
            f"expected bytes as an integer or with a unit (B, KiB, MiB, GiB, TiB, kB, MB, GB, TB), got {value!r}"
        )
    return int(float(match.group(1)) * _UNIT_BYTES[unit])


def format_bytes(num_bytes: int) -> str:
    """A byte count with a binary unit and three significant digits: "1.50 GiB"."""
    value = float(num_bytes)
    if abs(value) < 1024:
        return f"{num_bytes} B"
    units = iter(("KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    value /= 1024
    while abs(value) >= 1024 and unit != "TiB":
        value /= 1024
        unit = next(units)
    return f"{value:.2f} {unit}" if abs(value) < 100 else f"{value:.0f} {unit}"


def format_rate(per_second: float, unit: str = "B") -> str:
    """An amount a second with a decimal prefix and three digits: "3.32 GB/s", "65.7 TFLOP/s"."""
    prefixes = iter(("", "k", "M", "G", "T"))
    prefix = next(prefixes)
    while per_second >= 999.5 and prefix != "T":
        per_second /= 1000
        prefix = next(prefixes)
    return f"{_three_digits(per_second)} {prefix}{unit}/s"


def format_count(number: int) -> str:
    """A number of things with three digits: "8.03 B", "135 M", "1.20 k", "17"."""
    value = float(number)
    units = iter(("", " k", " M", " B", " T"))
    unit = next(units)
    while value >= 999.5 and unit != " T":
        value /= 1000
        unit = next(units)
    return f"{_three_digits(value)}{unit}" if unit else str(number)


def _three_digits(value: float) -> str:
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f}"


def format_seconds(seconds: float) -> str:
    """A duration: "850 us", "12.3 ms", "4.56 s", "3 min 20 s", "2 h 05 min"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple
