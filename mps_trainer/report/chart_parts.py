"""What the charts of a page share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mps_trainer.report.history import History
from mps_trainer.report.series import Line

_MARKERS_UP_TO = 60


@dataclass(frozen=True)
class Chart:
    """One chart: `svg`, or "" and then `nothing` says why."""

    title: str
    caption: str
    svg: str = ""
    nothing: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Data:
    """What the charts are made of, as `series` reads it."""

    batches: list[Line]
    operator: list[Line]
    history: History
    cap: int | None = None


def draw_line(
    axis: Any, x: list[float], y: list[float], colour: str, label: str = "", *, width: float = 1.4, marker: bool = True
) -> None:
    """A curve; short ones show their points."""
    # Dots show single batches; hundreds of them are a smear.
    dots = {"marker": "o", "markersize": 2.5} if marker and len(x) <= _MARKERS_UP_TO else {}
    axis.plot(x, y, color=colour, linewidth=width, label=label, **dots)


def legend_above(axis: Any, columns: int = 3) -> None:
    """The legend above the axes, right."""
    # Outside, where no curve can come.
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, borderaxespad=0.2, columnspacing=1.2)


def whole_numbers(axis: Any, *, both: bool = False) -> None:
    """Ticks at whole numbers: on the x axis, or on both."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if both:
        axis.yaxis.set_major_locator(MaxNLocator("auto", integer=True))


def lines_with(lines: list[Line], name: str) -> list[Line]:
    """Those that have a finite number of this name."""
    return [line for line in lines if line.get(name) is not None and math.isfinite(line[name])]


def batch_numbers(every: list[Line], some: list[Line]) -> list[float]:
    """Where each of `some` stands among all: an operator that was started again counts its batches anew."""
    number = {id(line): i for i, line in enumerate(every, 1)}
    return [float(number[id(line)]) for line in some]
