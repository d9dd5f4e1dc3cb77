"""How pytest-xdist spreads the tests over processes: `-n 2 --dist loadfile`, as scripts/test.sh calls it.

One process runs a file's tests one after another, as without xdist, and one process runs all of tests/trinity: they
share a private Ray, which costs seconds to start and several hundred megabytes. Long files come first, so that no
process waits at the end for another that has just begun one.

The groups are told by file and not by the marker `xdist_group`, which pytest-xdist 3.8 writes into the node ids where
pytest 9.2 does not see it.
"""

from __future__ import annotations

from typing import Any

import pytest


def group_of(node_id: str) -> str:
    """The tests that one process runs."""
    file = node_id.partition("::")[0]
    return "tests/trinity" if file.startswith("tests/trinity/") else file


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group by group: tests/trinity, then the files with a slow test, then the others. One process alone needs none."""
    if not hasattr(config, "workerinput"):
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)

    def rank(name: str) -> int:
        if name == "tests/trinity":
            return 0
        return 1 if any(item.get_closest_marker("slow") for item in groups[name]) else 2

    items[:] = [item for name in sorted(groups, key=rank) for item in groups[name]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file, but all of tests/trinity together, and in the order of collection."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Spread(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    # By default the group with the most tests goes first, whatever they take.
    config.option.loadscopereorder = False
    return Spread(config, log)
