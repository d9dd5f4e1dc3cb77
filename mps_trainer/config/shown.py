"""Settings as people read them."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

from mps_trainer.config.settings import Settings, Size
from mps_trainer.config.units import format_size

_HINTS = get_type_hints(Settings, include_extras=True)
#: The settings that are sizes in bytes.
SIZES = frozenset(name for name, hint in _HINTS.items() if hint == Size or Size in get_args(hint))


def show_setting(key: str, value: Any) -> str:
    """The value of `Settings.dump`, or of a saved settings.json, as text: a size with its unit, others as JSON."""
    if key in SIZES and isinstance(value, int) and not isinstance(value, bool):
        return format_size(value)
    return value if isinstance(value, str) else json.dumps(value)
