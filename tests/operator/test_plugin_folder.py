"""The short name and the dotted name, loaded the way Trinity loads plugins, by a user with a plugin folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

OPERATORS = Path(__file__).parents[2] / "operators"

USERS_PLUGIN = """
from trinity.buffer.operators import EXPERIENCE_OPERATORS, ExperienceOperatorV1


@EXPERIENCE_OPERATORS.register_module("{name}")
class UsersOwn(ExperienceOperatorV1):
    async def process(self, exps):
        return exps, {{}}
"""

CREATE = """
import sys
from trinity.buffer.operators import create_operators
from trinity.common.config import OperatorConfig
from trinity.utils.plugin_loader import load_plugins

load_plugins()
configs = [OperatorConfig(name=name, args={"enabled": False} if "users" not in name else {}) for name in sys.argv[1:]]
print(*(type(operator).__name__ for operator in create_operators(configs)))
"""


def created(folder: Path, *names: str) -> str:
    """The classes of the operators that Trinity makes of these names, with `folder` as its plugin folder."""

    answer = subprocess.run(
        [sys.executable, "-c", CREATE, *names],
        env={**os.environ, "TRINITY_PLUGIN_DIRS": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()[-1]


@pytest.fixture
def users_folder(tmp_path: Path) -> Iterator[Path]:
    """A plugin folder with one operator of the user's. Trinity copies plugins into its own package: removed again."""
    import trinity

    name = f"users_own_{tmp_path.parent.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USERS_PLUGIN.format(name=name))
    plugins = Path(trinity.__file__).parent / "plugins"
    before = set(plugins.iterdir())
    yield tmp_path
    for path in set(plugins.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_the_dotted_name_beside_a_plugin_folder_of_ones_own(users_folder: Path) -> None:
    [own] = (path.stem for path in users_folder.glob("*.py"))
    assert created(users_folder, own, "mps_trainer.operator.AuxTrainer") == "UsersOwn AuxTrainer"


def test_the_short_name_from_a_copy_in_ones_own_folder(users_folder: Path) -> None:
    [own] = (path.stem for path in users_folder.glob("*.py"))
    shutil.copy(OPERATORS / "aux_trainer.py", users_folder)
    assert created(users_folder, own, "aux_trainer") == "UsersOwn AuxTrainer"


def test_the_short_name_from_our_folder(users_folder: Path) -> None:
    assert created(OPERATORS, "aux_trainer") == "AuxTrainer"
