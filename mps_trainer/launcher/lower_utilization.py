"""`join: env`: the one memory share of all engines, lowered in the derived config.

There the plugin stays out of it, since a number is lowered once: here or by the plugin, never by both. The share is a
wish of each engine's own `gpu_memory_utilization`; a user who asks for less than the plan allows keeps it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mps_trainer.errors import ConfigError
from mps_trainer.launcher import yaml_edit
from mps_trainer.launcher.yaml_edit import CannotEditError, Edit

KEY = "gpu_memory_utilization"
#: What Trinity gives an engine whose block does not say.
TRINITY_DEFAULT = 0.9

Place = tuple[str | int, ...]
_ROLLOUT: Place = ("explorer", "rollout_model")
_AUXILIARY: Place = ("explorer", "auxiliary_models")


def places_to_lower(path: Path, highest: float | None) -> dict[Place, float]:
    """The mappings of the user's YAML whose engine asks for more than `highest`, each with the share that it gets.

    Raises:
        ConfigError: a share is no number, or cannot be resolved.
    """
    if highest is None:
        return {}
    tree = OmegaConf.load(path)
    auxiliary = _select(tree, _AUXILIARY)
    count = len(auxiliary) if isinstance(auxiliary, ListConfig) else 0
    engines = [_ROLLOUT, *((*_AUXILIARY, index) for index in range(count))]
    return {place: highest for place in engines if _wished(tree, place) > highest}


def edit(text: str, tree: Any, place: Place, share: float) -> Edit:
    """The edit that writes `share` at a place; CannotEditError when the text has no room for it there."""
    value: Any = share
    node = tree
    for depth, part in enumerate(place):
        rest: dict[str, Any] = {KEY: share}
        for name in reversed(place[depth + 1 :]):
            rest = {str(name): rest}
        if not isinstance(part, int) and part not in node:
            return yaml_edit.add_to_map(text, node, {part: rest})
        if not isinstance(part, int) and not node[part]:
            return yaml_edit.set_empty(text, node, part, rest)
        node = node[part]
    if KEY not in node and isinstance(place[-1], int) and node:
        # Nothing can stand before a list item's first key, which is behind its dash.
        return yaml_edit.add_line_after(text, node, next(iter(node)), {KEY: value})
    if KEY not in node:
        return yaml_edit.add_to_map(text, node, {KEY: value})
    if node[KEY] is None:
        return yaml_edit.set_empty(text, node, KEY, value)
    return yaml_edit.replace_scalar(text, (*place, KEY), value)


def lower(tree: Mapping[str, Any], place: Place, share: float) -> dict[str, Any]:
    """A copy of the plain tree with the share at its place; what an anchor shares with other places stays there."""
    top: dict[str, Any] = dict(tree)
    node: Any = top
    for part in place:
        below = node[part] if isinstance(part, int) else node.get(part)
        node[part] = copy.copy(below) or {}
        node = node[part]
    node[KEY] = share
    return top


def _wished(tree: Any, place: Place) -> float:
    found = _select(tree, (*place, KEY))
    if found is None:
        return TRINITY_DEFAULT
    try:
        return float(found)
    except (TypeError, ValueError):
        raise ConfigError(f"{_key(place)} is {found!r}", "write a share of the GPU, such as 0.9") from None


def _select(tree: Any, place: Place) -> Any:
    key = _key(place)
    try:
        return OmegaConf.select(tree, key)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{key} cannot be resolved: {str(error).splitlines()[0]}",
            "export the variable before you start, or write the number out: join: env has to compare it with the plan",
        ) from None


def _key(place: Place) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


__all__ = ["KEY", "TRINITY_DEFAULT", "CannotEditError", "Place", "edit", "lower", "places_to_lower"]
