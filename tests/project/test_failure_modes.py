"""The messages that docs/failure_modes.md quotes are messages of the code.

On the page `...` and `<what>` stand for what differs each time; each piece between them must be in the code as it is.
"""

import ast
import errno
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/failure_modes.md"
_SHORTEST = 4
# Numbers too, so that a page may show a real one.
_DIFFERS = r"\.\.\.|<[^>]*>|\b\d[\d.]*\b"


def constants(trees):
    """NAME = "text" of all modules, since messages are made of these as well."""
    for tree in trees:
        for node in tree.body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield from ((target.id, node.value.value) for target in node.targets if isinstance(target, ast.Name))


def literals(trees):
    """Plain strings, and f-strings with \0 for each value; parts that Python joins are one."""
    names = dict(constants(trees))
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.FormattedValue) else part for part in node.values)
            yield "".join(
                part.value if isinstance(part, ast.Constant) else names.get(getattr(part, "id", ""), "\0")
                for part in parts
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def code():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "mps_trainer").rglob("*.py")]
    # What the system says of a failed call is quoted, too.
    return "\1".join([*literals(trees), *map(os.strerror, errno.errorcode)])


def quoted():
    """The code spans of the first column of the tables of messages."""
    about_messages = False
    for line in PAGE.read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if len(cells) != 4:
            about_messages = False
        elif cells[1].strip() in ("message begins with", "what you see"):
            about_messages = True
        elif about_messages:
            yield from re.findall(r"`([^`]+)`", cells[1])


def pieces(message):
    message = message.removeprefix("aux_trainer/")
    for piece in re.split(_DIFFERS, message):
        piece = piece.strip(" '\"(),:;")
        if len(piece) >= _SHORTEST:
            yield piece


def missing(message, code):
    return [piece for piece in pieces(message) if piece not in code]


@pytest.mark.parametrize("message", sorted(set(quoted())))
def test_a_quoted_message_is_in_the_code(message, code):
    assert missing(message, code) == []


def test_a_message_that_the_code_does_not_have_is_noticed(code):
    assert missing("no such file: <path>", code) == []
    assert missing("no such fail: <path>", code) == ["no such fail"]


def test_the_page_has_the_messages():
    assert len(set(quoted())) > 60
