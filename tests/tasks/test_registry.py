from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from mps_trainer.columns import IDENTITY_COLUMNS, Column
from mps_trainer.errors import ConfigError, TaskError
from mps_trainer.tasks import AuxiliaryTask, load_task, prepare_task, wire_columns
from mps_trainer.tasks.preference_classifier import PreferenceClassifier

MODULE = """
    from torch import nn
    from mps_trainer import AuxiliaryTask, Column
    class Mine(AuxiliaryTask):
        def __init__(self, width: int = 4): self.width = width
        def columns(self): return [Column(name="x", source="info.x", shape=(self.width,))]
        def build_model(self): return nn.Linear(self.width, 1)
        def loss(self, model, batch): return model(batch["x"]).mean()
        def score(self, model, batch): return model(batch["x"])[:, 0]
    class Half(AuxiliaryTask):
        def columns(self): return []
    class Angry(Mine):
        def __init__(self): raise OSError("no file")
    class Unready(Mine):
        def prepare(self): raise ImportError("no such library")
    class NoTask: pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_tasks_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_built_in_and_own_tasks(module: str) -> None:
    assert isinstance(load_task("preference_classifier", {}), PreferenceClassifier)
    task = load_task(f"{module}:Mine", {"width": 7})
    assert [c.name for c in wire_columns(task)] == ["eid", "group", "reward", "x"]
    assert wire_columns(task)[-1].width == 7


def test_a_typo_names_the_nearest(module: str) -> None:
    with pytest.raises(ConfigError, match="did you mean 'preference_classifier'"):
        load_task("preference_clasifier", {})
    with pytest.raises(ConfigError, match=r"task_args\.feature_dmi.*\n.*did you mean 'feature_dim'"):
        load_task("preference_classifier", {"feature_dmi": 3})
    with pytest.raises(TaskError, match="did you mean 'Mine'"):
        load_task(f"{module}:Mime", {})


def test_a_module_that_does_not_import(module: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"does not import.*no_such_pkg(.|\n)*install 'no_such_pkg'.*PYTHONPATH"):
        load_task("no_such_pkg.tasks:Mine", {})
    (tmp_path / f"broken_{module}.py").write_text("import torch\nraise ValueError('half written')\n")
    with pytest.raises(TaskError, match="ValueError: half written"):
        load_task(f"broken_{module}:Mine", {})


@pytest.mark.parametrize(("name", "words"), [("NoTask", "no subclass"), ("Half", "lacks build_model, loss, score")])
def test_what_is_no_task(module: str, name: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        load_task(f"{module}:{name}", {})


def test_a_constructor_that_raises(module: str) -> None:
    with pytest.raises(TaskError, match="OSError: no file"):
        load_task(f"{module}:Angry", {})


class Columns(AuxiliaryTask):
    def __init__(self, *columns: object) -> None:
        self._columns = columns

    def columns(self) -> list[Column]:
        return list(self._columns)  # type: ignore[arg-type]

    def build_model(self) -> torch.nn.Module:
        raise NotImplementedError

    loss = score = build_model  # type: ignore[assignment]


def test_column_names_are_unique() -> None:
    x = Column(name="x", source="info.x")
    assert wire_columns(Columns(x)) == (*IDENTITY_COLUMNS, x)
    with pytest.raises(ConfigError, match="'x' more than once"):
        wire_columns(Columns(x, x))
    with pytest.raises(ConfigError, match="'reward', which every task has"):
        wire_columns(Columns(Column(name="reward", source="reward")))
    with pytest.raises(TaskError, match=r"columns\(\) holds 'x'"):
        wire_columns(Columns("x"))


def test_what_goes_wrong_in_prepare_is_the_tasks(module: str) -> None:
    prepare_task(load_task(f"{module}:Mine", {}))
    with pytest.raises(TaskError, match=r"Unready raised in prepare\(\): ImportError: no such library"):
        prepare_task(load_task(f"{module}:Unready", {}))
