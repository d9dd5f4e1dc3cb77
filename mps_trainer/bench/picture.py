"""The picture: how much of the rollout is kept, against how fast the trainer is; one dot an arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mps_trainer.errors import ConfigError

# Okabe and Ito, told apart with every kind of colour vision; the product's arms have the strong ones.
_COLOURS = {
    "none-client": "#777777", "cpu-in-operator": "#E69F00", "rest-cpu": "#CC79A7", "sidecar-cpu": "#009E73",
    "rest-gpu": "#F0E442", "own-gpu": "#56B4E9", "time-slices": "#D55E00", "mps-plain": "#999933", "mps-low": "#0072B2",
    "mps-pace": "#000000",
}  # fmt: skip
_MARKERS = ("o", "s", "^", "D", "v", "P")

#: Of variants of the pace, in turn.
_MORE = ("#7F3C8D", "#11A579", "#E73F74", "#80BA5A", "#A5AA99")


def _colour(arm: str) -> str:
    return _COLOURS[arm] if arm in _COLOURS else _MORE[sum(arm.encode()) % len(_MORE)]


def draw(sessions: Sequence[Mapping[str, Any]], subtitle: str, png: Path) -> Path:
    """One panel for each task; ConfigError without matplotlib."""
    try:
        # Figure by itself brings the Agg canvas: no display, no global state of pyplot.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"drawing needs matplotlib: {error}", "pip install -e '.[report]' in the clone of mps-trainer"
        ) from None
    figure = Figure(figsize=(1.5 + 5.8 * len(sessions), 5.4), dpi=130, layout="constrained")
    panels = figure.subplots(1, len(sessions), squeeze=False)[0]
    for axis, session in zip(panels, sessions, strict=True):
        _panel(axis, session)
    figure.suptitle(subtitle, fontsize=8.5, x=0.01, ha="left", color="#555555")
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png)
    return png


def _panel(axis: Any, session: Mapping[str, Any]) -> None:
    rows = [row for row in session["rows"] if row["of_dedicated"] is not None]
    loads = list(dict.fromkeys(row["load"] for row in rows))
    for row in rows:
        x, y = row["of_dedicated"], row["rollout_kept"]
        axis.errorbar(
            x["median"], y["median"], fmt=_MARKERS[loads.index(row["load"]) % len(_MARKERS)], markersize=7,
            xerr=[[x["median"] - x["min"]], [x["max"] - x["median"]]],
            yerr=[[y["median"] - y["min"]], [y["max"] - y["median"]]],
            color=_colour(row["arm"]), markeredgecolor="white", markeredgewidth=0.8, linewidth=0.9, alpha=0.9,
            capsize=0, zorder=3,
        )  # fmt: skip
    axis.axhline(1.0, color="#777777", linewidth=1, linestyle="--", zorder=1)
    axis.set_title(f"Task {session['task']}, {session['rounds']} rounds", loc="left", fontsize=10)
    axis.set_xlabel("trainer speed, share of the trainer alone")
    axis.set_ylabel("rollout kept, share of solo")
    axis.set_xlim(left=0)
    low = min([row["rollout_kept"]["min"] for row in rows] + [0.9])
    high = max([row["rollout_kept"]["max"] for row in rows] + [1.02])
    axis.set_ylim(max(0.0, low - 0.04), high + 0.04)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#e6e6e6", linewidth=0.7)
    axis.set_axisbelow(True)
    _legend(axis, list(dict.fromkeys(row["arm"] for row in rows)), loads)


def _legend(axis: Any, arms: Sequence[str], loads: Sequence[str]) -> None:
    if not arms:
        return
    style: dict[str, Any] = {"loc": "upper left", "fontsize": 8, "frameon": False, "handletextpad": 0.3}
    dots = [axis.plot([], [], "o", color=_colour(name), label=name)[0] for name in arms]
    axis.add_artist(axis.legend(handles=dots, bbox_to_anchor=(0, -0.12), ncols=min(5, len(dots)), **style))
    rows = -(-len(dots) // 5)
    shapes = [
        axis.plot([], [], marker, color="#555555", markerfacecolor="none", label=load)[0]
        for load, marker in zip(loads, _MARKERS, strict=False)
    ]
    axis.legend(handles=shapes, bbox_to_anchor=(0, -0.12 - 0.05 * rows), ncols=5, **style)
