"""Write docs/settings.md and docs/built_in_tasks.md from the code; a test fails when they differ.

usage: python scripts/settings_reference.py [--check]
"""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from mps_trainer.config import FilterSettings, RewardSettings, Settings, format_size
from mps_trainer.tasks.registry import BUILT_IN_TASKS

DOCS = Path(__file__).parents[1] / "docs"
SIZES = {"memory", "ring_slot"}
DURATIONS = {
    "probation_timeout",
    "score_timeout",
    "block_timeout",
    "ready_timeout",
    "hang_timeout",
    "idle_timeout",
}

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


TASKS_HEAD = """# Built-in tasks

Name one with `task:`, and its arguments under `task_args:`. When each fits, what its score means and a config: the
pages in `docs/tasks/`. A task of your own: `docs/write_a_task.md`. This page is generated:
`python scripts/settings_reference.py`.
"""


def task_page() -> str:
    return TASKS_HEAD + "".join(task_section(name, target) for name, target in BUILT_IN_TASKS.items())


def task_section(name: str, target: str) -> str:
    module_name, _, class_name = target.partition(":")
    module = importlib.import_module(module_name)
    task_class = getattr(module, class_name)
    text = inspect.cleandoc(module.__doc__ or "").replace(f"The built-in task `{name}`: ", "", 1)
    text = text.replace("The built-in task: ", "", 1)
    meaning = arguments(task_class)
    table = "".join(
        f"| `{parameter.name}` | `{parameter.default}` | {meaning[parameter.name]} |\n"
        for parameter in inspect.signature(task_class).parameters.values()
    )
    return f"\n## {name}\n\n{text[0].upper()}{text[1:]}\n\n| argument | default | meaning |\n|---|---|---|\n{table}"


def arguments(task_class: type) -> dict[str, str]:
    """What the docstring's Args section says of each argument; a line may describe several."""
    lines = inspect.getdoc(task_class).partition("Args:\n")[2]  # type: ignore[union-attr]
    found = {}
    for names, meaning in re.findall(r"^    ([\w, ]+): ((?:.|\n        )*)", lines, re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), re.sub(r"\s+", " ", meaning).strip().replace("|", "\\|"))
    return found


def main() -> int:
    pages = {DOCS / "settings.md": page(), DOCS / "built_in_tasks.md": task_page()}
    wrong = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        for path in wrong:
            print(f"{path.name} differs from the code; run: python scripts/settings_reference.py", file=sys.stderr)
        return int(bool(wrong))
    for path in wrong:
        path.write_text(pages[path])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
