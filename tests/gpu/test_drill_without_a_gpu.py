"""What the GPU drills decide, tried without a GPU: counting, judging, and one daemon for several runs."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in [name for name in sys.modules if name.startswith("gpu_")]:
        del sys.modules[name]


def row(way, *, died=False, status=0):
    return {
        "way": way,
        "up": True,
        "victim died": died,
        "status": status,
        "wrong results": 0,
        "seconds": 1.0,
        "how": "",
    }


def test_bound_is_the_exact_one(scripts):
    from gpu_fault_drill import upper_bound

    assert upper_bound(0, 20) == pytest.approx(1 - 0.05 ** (1 / 20))
    assert upper_bound(1, 20) == pytest.approx(0.2161, abs=1e-4)
    assert upper_bound(0, 0) == upper_bound(3, 3) == 1.0


def test_trials_that_were_done_are_not_done_again_and_the_control_comes_first(scripts):
    from gpu_fault_drill import plan

    ways = {"return": 2, "nan": 2, "naive-sigkill": 1}
    assert plan(list(ways), ways, [row("nan")]) == ["naive-sigkill", "return", "return", "nan"]


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([row("return"), row("naive-sigkill", died=True)], 0),
        ([row("return", died=True), row("naive-sigkill", died=True)], 1),
        ([row("return"), row("naive-sigkill")], 1),
        ([row("naive-sigkill", died=True)], 3),
        ([row("return", status=-9), row("naive-sigkill", died=True)], 3),
    ],
    ids=["as wanted", "a death of ours", "a control without a death", "too few", "ended in another way"],
)
def test_verdict_of_the_drill(scripts, rows, status, capsys):
    from gpu_fault_drill import Drill, report

    assert report(Drill([], rows, 0.0, None), {"return": 1, "naive-sigkill": 1})[1] == status
