"""Write docs/settings.md from the code; a test fails when the two differ.

usage: python scripts/settings_reference.py [--check]
"""

import sys
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from mps_trainer.config import FilterSettings, RewardSettings, Settings, format_size

TARGET = Path(__file__).parents[1] / "docs" / "settings.md"
SIZES = {"memory", "ring_slot"}
DURATIONS = {"probation_timeout", "score_timeout", "block_timeout", "ready_timeout", "idle_timeout"}

HEAD = """# Settings

The operator's `args` in Trinity's YAML are the one place for settings. Sizes carry their unit (`8GiB`), durations too
(`50ms`, `2s`, `10min`). An unknown key is refused with the nearest valid one. `mps-trainer plan trinity.yaml` prints
what they resolve to. This page is generated: `python scripts/settings_reference.py`.

| key | default | meaning |
|---|---|---|
"""


def default_of(name: str, field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, (FilterSettings, RewardSettings)):
        return "see below"
    if value is None:
        return "-"
    if name in SIZES:
        return f"`{format_size(value).replace(' ', '').replace('.0', '')}`"
    if name in DURATIONS:
        return f"`{value * 1000:g}ms`" if value < 1 else f"`{value:g}s`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def choices(field: FieldInfo) -> str:
    words = [word for word in get_args(field.annotation) if isinstance(word, str)]
    missing = [word for word in words if word not in (field.description or "")]
    return f" ({' / '.join(words)})" if missing else ""


def rows(model: type, prefix: str = "") -> str:
    return "".join(
        f"| `{prefix}{name}` | {default_of(name, field)} | {field.description}{choices(field)} |\n"
        for name, field in model.model_fields.items()
    )


def page() -> str:
    return HEAD + rows(Settings) + rows(FilterSettings, "filter.") + rows(RewardSettings, "reward.")


def main() -> int:
    if "--check" in sys.argv:
        if TARGET.read_text() != page():
            print(f"{TARGET.name} differs from the code; run: python scripts/settings_reference.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
