"""Add keys to a YAML text without touching any other byte of it.

ruamel.yaml says where each key stands; the edit itself is done on the text. A round trip through ruamel would keep
comments but may move them and change indentation, and a reader of the diff should see what was meant and no more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap


@dataclass(frozen=True)
class Edit:
    """Replace `length` characters at (line, column) by `text`; a line of its own when `column` is 0."""

    line: int
    column: int
    text: str
    length: int = 0


class CannotEditError(ValueError):
    """The text has a shape that cannot be edited in place, such as an alias where a mapping is needed."""


def load(text: str) -> Any:
    """The text as ruamel's nodes, which know their places."""
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    return yaml.load(text)


def plain(text: str) -> Any:
    """The text as plain values, to compare two texts by meaning."""
    return YAML(typ="safe", pure=True).load(text)


def apply(text: str, edits: list[Edit]) -> str:
    """The text with all edits done; their places are those of the original."""
    lines = text.splitlines(keepends=True)
    # From the end, so that an edit does not move the places of the others; a stable sort keeps the order at one place.
    for edit in sorted(reversed(edits), key=lambda edit: (edit.line, edit.column), reverse=True):
        if edit.line == len(lines):
            if lines and not lines[-1].endswith("\n"):
                lines[-1] += "\n"
            lines.append("")
        line = lines[edit.line]
        lines[edit.line] = line[: edit.column] + edit.text + line[edit.column + edit.length :]
    return "".join(lines)


def add_to_map(text: str, node: Any, values: dict[str, Any]) -> Edit:
    """An edit that puts `values` in front of a mapping's first key."""
    if not isinstance(node, CommentedMap):
        raise CannotEditError("no mapping")
    lines = text.splitlines()
    if node.fa.flow_style():
        line, column = node.lc.line, node.lc.col
        if lines[line][column : column + 1] != "{":
            raise CannotEditError("an inline mapping behind an anchor or a tag")
        inside = ", ".join(f"{key}: {scalar(value)}" for key, value in values.items())
        return Edit(line, column + 1, inside + (", " if node else ""))
    if not node:
        raise CannotEditError("an empty mapping")
    line, column = min(node.lc.key(key) for key in node if key in node.lc.data)
    indent = lines[line][:column]
    if indent.strip():
        raise CannotEditError("a mapping that starts behind a dash or another key")
    return Edit(line, 0, block(values, column))


def add_line_after(text: str, node: CommentedMap, key: str, values: dict[str, Any]) -> Edit:
    """An edit that puts `values` behind the one-line entry `key` of a block mapping."""
    line, column = node.lc.key(key)
    if node.fa.flow_style():
        return add_to_map(text, node, values)
    return Edit(line + 1, 0, block(values, column))


def set_empty(text: str, node: CommentedMap, key: str, value: Any) -> Edit:
    """An edit that gives a value to `key`, which has none (`key:`, `key: null`, `key: ""`)."""
    line, column = node.lc.key(key)
    if node.fa.flow_style():
        raise CannotEditError("an inline mapping")
    current = text.splitlines()[line]
    body, hash_sign, comment = current[column:].partition(" #")
    if body.partition(":")[2].strip() not in ("", "null", "~", "{}", '""', "''", "Null", "NULL"):
        raise CannotEditError("a value that is spread over lines")
    new = f"{key}: {scalar(value)}" + (f"  #{comment}" if hash_sign else "")
    return Edit(line, column, new, len(current) - column)


def replace_scalar(text: str, place: tuple[str | int, ...], value: Any) -> Edit:
    """An edit that replaces the one-line scalar at a place (keys and indices from the top) and keeps its comment."""
    key_mark = None
    node = YAML(typ="rt").compose(text)
    for part in place:
        if isinstance(part, int):
            node = node.value[part]
            continue
        found = [pair for pair in node.value if pair[0].value == part]
        if len(found) != 1:
            raise CannotEditError(f"{part} comes from a merge (<<)")
        key_mark, node = found[0][0].end_mark, found[0][1]
    start, end = node.start_mark, node.end_mark
    if key_mark is None or start.index < key_mark.index:
        raise CannotEditError(f"{place[-1]} is an alias")
    if start.line != end.line:
        raise CannotEditError(f"{place[-1]} is spread over lines")
    return Edit(start.line, start.column, scalar(value), end.column - start.column)


def block(values: dict[str, Any], indent: int) -> str:
    """Lines of a block mapping."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"{' ' * indent}{key}:\n", block(value, indent + 2)]
        else:
            lines.append(f"{' ' * indent}{key}: {scalar(value)}\n")
    return "".join(lines)


def scalar(value: Any) -> str:
    """One value in YAML's inline form; JSON is a subset of it, and its quotes leave no room for a misreading."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {scalar(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)
