"""The declared columns as bytes: both sides must have declared the same ones, in the same order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from mps_trainer.columns import Column
from mps_trainer.errors import ConfigError

MAX_BYTES = 60 * 4096


def describe(columns: Sequence[Column]) -> bytes:
    """Canonical JSON of what decides the layout of a batch. Sources may differ, they never reach the wire."""
    names = [column.name for column in columns]
    if len(set(names)) != len(names) or not names:
        raise ConfigError(f"columns {names}", "declare at least one column and no name twice")
    listed = [
        {
            "name": c.name,
            "dtype": c.dtype,
            "shape": list(c.shape),
            "maximum": c.maximum if c.kind in ("ragged", "text") else None,
        }
        for c in columns
    ]
    text = json.dumps(listed, separators=(",", ":"), sort_keys=True).encode("ascii")
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{len(columns)} columns need {len(text)} bytes to describe", f"stay below {MAX_BYTES} bytes")
    return text


def digest(description: bytes) -> bytes:
    """SHA-256 of a description, 32 bytes."""
    return hashlib.sha256(description).digest()


def difference(operator: bytes, sidecar: bytes) -> str:
    """One sentence that names the first column in which two descriptions differ; "" when they are equal."""
    if operator == sidecar:
        return ""
    theirs, ours = _parse(operator), _parse(sidecar)
    for position, (a, b) in enumerate(zip(theirs, ours)):  # noqa: B905  # the rest is compared below
        if a != b:
            return f"column {position} is {_show(a)} in the operator and {_show(b)} in the sidecar"
    longer, who = (theirs, "operator") if len(theirs) > len(ours) else (ours, "sidecar")
    return (
        f"column {_show(longer[min(len(theirs), len(ours))])} is declared only in the {who}" if longer else "unreadable"
    )


def _parse(description: bytes) -> list[Any]:
    try:
        parsed = json.loads(description)
    except (ValueError, RecursionError):
        return []
    return parsed if isinstance(parsed, list) else []


def _show(column: Any) -> str:
    if not isinstance(column, dict):
        return "unreadable"
    shape = column.get("shape")
    return f"{column.get('name')!r} ({column.get('dtype')}, shape {shape}, maximum {column.get('maximum')})"[:200]
