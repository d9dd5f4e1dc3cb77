"""Rules of the house that a linter has no rule for."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "mps_trainer").rglob("*.py"))
SHIPPED = [*PACKAGE, *sorted((ROOT / "operators").glob("*.py")), *sorted((ROOT / "scripts").glob("*"))]
MAX_FILE_LINES = 310
MAX_FUNCTION_LINES = 55


def functions():
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield path, node


def test_no_file_is_too_long():
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in SHIPPED if p.is_file()}
    assert {path: count for path, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_no_function_is_too_long():
    long = {
        f"{path.relative_to(ROOT)}:{node.name}": node.end_lineno - node.lineno + 1
        for path, node in functions()
        if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert long == {}


@pytest.mark.parametrize("pattern", [r"\bpkill\b", r"\bkillall\b", r"os\._exit\(0\)", r"ray stop\b"])
def test_nothing_kills_by_name(pattern):
    # Killing by name ends other people's jobs on a shared machine.
    guilty = [p.name for p in SHIPPED if p.is_file() and re.search(pattern, p.read_text())]
    assert guilty == []


def test_the_package_never_unpickles():
    # What is read from shared memory or a run folder must never run code. (A benchmark measures pickle as a peer.)
    assert [p.name for p in PACKAGE if re.search(r"import pickle|pickle\.load", p.read_text())] == []


def test_every_error_class_is_drawn_in_the_tree():
    source = (ROOT / "mps_trainer/errors.py").read_text()
    drawing = source.split('"""')[1]
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            assert node.name in drawing


def test_no_two_test_files_have_one_name():
    """Pytest imports them all as top-level modules; from a second one of a name it collects nothing."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
