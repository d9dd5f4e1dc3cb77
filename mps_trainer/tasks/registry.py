"""From the YAML's `task` and `task_args` to a task object, and from a task to the columns that travel."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mps_trainer.columns import IDENTITY_COLUMNS, Column
from mps_trainer.errors import ConfigError, MpsTrainerError, TaskError
from mps_trainer.tasks.base import AuxiliaryTask

#: Short names of the tasks that come with this package.
BUILT_IN_TASKS: Mapping[str, str] = {
    "preference_classifier": "mps_trainer.tasks.preference_classifier:PreferenceClassifier",
    "token_outlier": "mps_trainer.tasks.token_outlier:TokenOutlier",
    "pass_rate": "mps_trainer.tasks.pass_rate:PassRate",
    "reward_model": "mps_trainer.tasks.reward_model:RewardModel",
}


def load_task(name: str, task_args: Mapping[str, Any]) -> AuxiliaryTask:
    """The task that the YAML names, built with its `task_args`.

    `name` is a built-in task or "my_pkg.my_module:MyTask". ConfigError: the name or an argument is wrong.
    TaskError: the module does not import, or the constructor raises.
    """
    task_class = _find_class(name)
    _check_arguments(name, task_class, task_args)
    try:
        return task_class(**task_args)
    except MpsTrainerError:
        raise
    except Exception as error:
        raise TaskError(
            f"task {name!r} raised in its constructor: {type(error).__name__}: {error}",
            f"correct task_args ({_show(task_args)}) or the task's __init__",
        ) from error


def wire_columns(task: AuxiliaryTask) -> tuple[Column, ...]:
    """The identity columns and the task's own: everything that travels. ConfigError when a name is there twice."""
    name = type(task).__name__
    try:
        own = tuple(task.columns())
    except MpsTrainerError:
        raise
    except Exception as error:
        raise TaskError(
            f"task {name} raised in columns(): {type(error).__name__}: {error}", "correct the task's columns()"
        ) from error
    for column in own:
        if not isinstance(column, Column):
            raise TaskError(f"task {name}.columns() holds {column!r}", "return a list of mps_trainer.Column")
    reserved = {column.name for column in IDENTITY_COLUMNS}
    for column in own:
        if column.name in reserved:
            raise ConfigError(
                f"task {name} declares a column {column.name!r}, which every task has already",
                f"drop it and use batch[{column.name!r}], or give yours another name",
            )
    twice = [column for column, count in Counter(column.name for column in own).items() if count > 1]
    if twice:
        raise ConfigError(f"task {name} declares the column {twice[0]!r} more than once", "give each its own name")
    return (*IDENTITY_COLUMNS, *own)


def prepare_task(task: AuxiliaryTask) -> None:
    """The task's `prepare`. TaskError when it raises."""
    try:
        task.prepare()
    except MpsTrainerError:
        raise
    except Exception as error:
        raise TaskError(
            f"task {type(task).__name__} raised in prepare(): {type(error).__name__}: {error}", "correct prepare()"
        ) from error


def _find_class(name: str) -> Callable[..., AuxiliaryTask]:
    target = BUILT_IN_TASKS.get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not colon or not module_name or not class_name:
        raise ConfigError(f"there is no task {name!r}", _nearest(name, BUILT_IN_TASKS, 'write it as "module:Class"'))
    module = _import(name, module_name)
    found = vars(module).get(class_name)
    if found is None:
        classes = [key for key, value in vars(module).items() if _is_task(value)]
        raise TaskError(
            f"task {name!r}: module {module_name} has no class {class_name!r}",
            _nearest(class_name, classes, "define it there, as a subclass of mps_trainer.AuxiliaryTask"),
        )
    if not _is_task(found):
        raise TaskError(
            f"task {name!r} is {found!r}, which is no subclass of AuxiliaryTask",
            f"write `class {class_name}(mps_trainer.AuxiliaryTask)` and its columns, build_model, loss and score",
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise TaskError(f"task {name!r} lacks {missing}", "every task defines columns, build_model, loss and score")
    task_class: Callable[..., AuxiliaryTask] = found
    return task_class


def _import(name: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name in _parents(module_name)
        todo = (
            f"install {module_name.split('.')[0]!r} into this venv, or put its folder on PYTHONPATH where the sidecar "
            "starts and, for the operator, where `ray start` runs"
            if missing
            else f"make `python -c 'import {module_name}'` work in this venv"
        )
        raise TaskError(f"task {name!r} does not import: {type(error).__name__}: {error}", todo) from error


def _parents(module_name: str) -> list[str]:
    parts = module_name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _is_task(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, AuxiliaryTask)


def _check_arguments(name: str, task_class: Callable[..., AuxiliaryTask], task_args: Mapping[str, Any]) -> None:
    signature = inspect.signature(task_class)
    try:
        signature.bind(**task_args)
        return
    except TypeError as error:
        message = str(error)
    known = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for key in task_args:
        if key not in known:
            raise ConfigError(f"task {name!r} has no argument {key!r} (task_args.{key})", _nearest(key, known, ""))
    raise ConfigError(f"task {name!r}: task_args cannot be used: {message}", f"its arguments are {signature}")


def _nearest(word: str, valid: Iterable[str], otherwise: str) -> str:
    valid = list(valid)
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    listed = f"there is {', '.join(valid)}" if valid else "remove it: this task takes no arguments"
    return f"{listed}; {otherwise}" if otherwise else listed


def _show(task_args: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in task_args.items()) or "empty"
