"""The documents say what the code does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_settings_page_is_generated_from_the_code():
    script = ROOT / "scripts/settings_reference.py"
    subprocess.run([sys.executable, script, "--check"], check=True, timeout=120)


PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    ROOT / "operators/README.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page):
    text = page.read_text()
    linked = {target.partition("#")[0] for target in re.findall(r"\]\((?!https?:|#)([^)]+)\)", text)}
    assert [target for target in linked if not (page.parent / target).exists()] == []
    named = set(re.findall(r"`((?:docs|scripts|examples|operators|tests)/[\w./-]*\w)`", text))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_command_is_in_the_readme_and_has_help():
    from typer.main import get_command

    from mps_trainer.cli.app import app

    readme = (ROOT / "README.md").read_text()
    for name, command in get_command(app).commands.items():
        assert command.help, name
        assert re.search(rf"mps-trainer {name}\b|`{name}`", readme), f"{name} is not in the README"


def test_the_task_in_the_docs_works():
    import torch

    from mps_trainer.sidecar.worst_case import worst_case_batch
    from mps_trainer.tasks import TaskBatch, wire_columns

    [code] = re.findall(r"```python\n(# my_task.py.*?)```", (ROOT / "docs/write_a_task.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, "write_a_task.md", "exec", dont_inherit=True), names)
    task = names["LengthBaseline"]()
    batch = TaskBatch.from_packed(worst_case_batch(wire_columns(task), 4))
    model = task.build_model()
    assert torch.isfinite(task.loss(model, batch))
    assert task.score(model, batch).shape == (4,)
    assert len(batch.texts["eid"]) == 4
