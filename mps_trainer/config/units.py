"""Sizes and durations as people write them: "8GiB", "50ms", "10min"."""

from __future__ import annotations

import re

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?\s*", re.IGNORECASE)
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|h)?\s*")

_SIZE_FACTORS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
#: Thirty years: longer waits overflow the system's timers and mean a typo.
_LONGEST_S = 1e9
_DURATION_FACTORS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_size(value: object) -> int:
    """Bytes from "8GiB", "512MB" or a plain number of bytes; ValueError says what is accepted."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is no size; write it like 8GiB or 512MiB")
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is no size; write it like 8GiB or 512MiB")
    return int(float(match[1]) * _SIZE_FACTORS[(match[2] or "B").lower()])


def parse_duration(value: object) -> float:
    """Seconds from "50ms", "2s", "10min", "1h" or a plain number of seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # A number comes from a saved settings file; its text may be in exponent form.
        if not 0 <= value < _LONGEST_S:
            raise ValueError(f"{value!r} is no duration; use 0 to {_LONGEST_S:.0e} seconds")
        return float(value)
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no duration; write it like 50ms, 2s or 10min")
    match = _DURATION.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is no duration; write it like 50ms, 2s or 10min")
    return parse_duration(float(match[1]) * _DURATION_FACTORS[match[2] or "s"])


def format_size(num_bytes: float) -> str:
    """A size for people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
