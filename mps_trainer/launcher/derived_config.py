"""The derived config: the user's Trinity YAML with only named keys changed, written beside it.

Comments stay, and interpolations stay text, because they may hold secrets or be meant for another machine. The
user's file is never touched.
"""

from __future__ import annotations

import copy
import difflib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from mps_trainer.errors import ConfigError
from mps_trainer.launcher import lower_utilization, yaml_edit
from mps_trainer.launcher.lower_utilization import Place
from mps_trainer.launcher.trinity_config import OPERATORS_KEY, TrinityConfig
from mps_trainer.launcher.yaml_edit import CannotEditError, Edit
from mps_trainer.run import this_host

HEADER = "# Derived by mps-trainer"


@dataclass(frozen=True)
class DerivedConfig:
    """The text of a derived config and what it changes (a unified diff)."""

    path: Path
    text: str
    diff: str

    def write(self) -> None:
        """Write it by rename; ConfigError when the place is not ours to write."""
        check_is_ours(self.path)
        try:
            descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            try:
                with os.fdopen(descriptor, "w") as file:
                    file.write(self.text)
                Path(temporary).replace(self.path)
            except OSError:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.path}: {error.strerror}",
                "the derived config goes beside your YAML: make that folder writable (with free space), or copy the "
                "YAML to one that is",
            ) from None


def check_is_ours(path: Path) -> None:
    """ConfigError when a file at `path` was not written by us."""
    try:
        with path.open(errors="replace") as file:
            first = file.readline()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "move it away") from None
    if not first.startswith(HEADER):
        raise ConfigError(
            f"{path} exists and was not written by mps-trainer", "rename it: the derived config needs that name"
        )


def derive(config: TrinityConfig, *, run_file: Path, one_gpu: bool, utilization: float | None = None) -> DerivedConfig:
    """Make the derived config of a run; see `derive_with`."""
    # The host too: where the coordinator runs elsewhere, the operator can then say so, and not only miss a file.
    ours = {"run_file": str(run_file), "run_host": this_host()}
    return derive_with(config, ours, one_gpu=one_gpu, utilization=utilization)


def derive_with(
    config: TrinityConfig, ours: dict[str, Any], *, one_gpu: bool, utilization: float | None = None
) -> DerivedConfig:
    """A derived config with args of our own; ConfigError when the file has a shape that cannot be added to.

    Args:
        ours: args of the operator that the file does not have.
        one_gpu: the machine has exactly one GPU; Trinity turns every mode into colocate there unless the file
            says how large the cluster is.
        utilization: the highest gpu_memory_utilization of an engine (`join: env`); None leaves each as it is.
    """
    original = config.path.read_text()
    shares = lower_utilization.places_to_lower(config.path, utilization)
    shape = one_gpu and config.mode != "colocate" and not config.has_cluster_shape
    try:
        tree = yaml_edit.load(original)
        edits = [*_top_edits(original, tree, config, shape), _args_edit(original, tree, config, ours)]
        edits += [lower_utilization.edit(original, tree, place, share) for place, share in shares.items()]
        body = yaml_edit.apply(original, edits)
        changed_as_meant = yaml_edit.plain(body) == _wanted(original, config, ours, shape, shares)
    except (CannotEditError, YAMLError, RecursionError) as error:
        raise _cannot_add(config, str(error).splitlines()[0]) from None
    if not changed_as_meant:
        raise _cannot_add(config, "an anchor, an alias or a tag is in the way")
    header = f"{HEADER} from {config.path.name} and written anew at each start: change that file, not this one.\n"
    return DerivedConfig(
        path=config.derived_path,
        text=header + body,
        diff=_diff(original, body, config.path.name, config.derived_path.name),
    )


def _top_edits(text: str, tree: CommentedMap, config: TrinityConfig, shape: bool) -> list[Edit]:
    edits = []
    new: dict[str, Any] = {}
    if "ray_namespace" not in tree:
        new["ray_namespace"] = config.ray_namespace
    elif not tree["ray_namespace"]:
        edits.append(yaml_edit.set_empty(text, tree, "ray_namespace", config.ray_namespace))
    if shape:
        cluster = {"node_num": 1, "gpu_per_node": 1}
        if "cluster" not in tree:
            new["cluster"] = cluster
        elif not tree["cluster"]:
            edits.append(yaml_edit.set_empty(text, tree, "cluster", cluster))
        else:
            missing = {key: value for key, value in cluster.items() if key not in tree["cluster"]}
            edits.append(yaml_edit.add_to_map(text, tree["cluster"], missing))
    return edits + ([yaml_edit.add_to_map(text, tree, new)] if new else [])


def _args_edit(text: str, tree: CommentedMap, config: TrinityConfig, ours: dict[str, Any]) -> Edit:
    node: Any = tree
    for key in OPERATORS_KEY.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    if not isinstance(node, CommentedSeq):
        raise CannotEditError(f"{OPERATORS_KEY} is not written out as a list")
    operator = node[config.operator_index]
    if not isinstance(operator, CommentedMap):
        raise CannotEditError("our operator is not written out as name and args")
    if "args" not in operator:
        return yaml_edit.add_line_after(text, operator, "name", {"args": ours})
    if not operator["args"]:
        return yaml_edit.set_empty(text, operator, "args", ours)
    return yaml_edit.add_to_map(text, operator["args"], ours)


def _wanted(
    original: str, config: TrinityConfig, ours: dict[str, Any], shape: bool, shares: Mapping[Place, float]
) -> Any:
    # The operator is copied before it changes: an anchor that it shares with another must not seem to change too.
    tree = yaml_edit.plain(original)
    if not tree.get("ray_namespace"):
        tree["ray_namespace"] = config.ray_namespace
    if shape:
        tree["cluster"] = {"node_num": 1, "gpu_per_node": 1, **(tree.get("cluster") or {})}
    node = tree
    for key in OPERATORS_KEY.split("."):
        node = node[key]
    operator = copy.copy(node[config.operator_index])
    operator["args"] = {**ours, **(operator.get("args") or {})}
    node[config.operator_index] = operator
    for place, share in shares.items():
        tree = lower_utilization.lower(tree, place, share)
    return tree


def _cannot_add(config: TrinityConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"cannot make the derived config of {config.path.name}: {reason}",
        "write our operator's block (name and args), the top level and, with join: env, the engines' blocks out, "
        "without anchors, aliases or inline braces",
    )


def _diff(before: str, after: str, before_name: str, after_name: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), before_name, after_name, n=1, lineterm="")
    return "\n".join(lines)
