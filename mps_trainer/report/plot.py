"""One picture of a run: loss, AUC, scores, and what was dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mps_trainer.errors import ConfigError, RunError
from mps_trainer.report.series import Line, batch_lines, column, operator_lines
from mps_trainer.report.summary import summarize

# Colours of Okabe and Ito, told apart with every kind of colour vision.
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"


def plot(run_dir: Path, png: Path) -> Path:
    """Draw the run into `png`; its path. ConfigError without matplotlib, RunError without a batch to draw."""
    batches, operator = batch_lines(run_dir), operator_lines(run_dir)
    if not batches:
        raise RunError(
            f"{run_dir / 'metrics.jsonl'} holds no batch yet", "wait for the first batch, or look into sidecar.log"
        )
    figure_class = _import_figure()
    figure = figure_class(figsize=(11, 7), dpi=130, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    axes = figure.subplots(2, 2)
    _draw_loss(axes[0, 0], batches)
    _draw_auc(axes[0, 1], batches)
    _draw_scores(axes[1, 0], batches)
    _draw_drops(axes[1, 1], batches, operator)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e6e6e6", linewidth=0.7)
        axis.set_axisbelow(True)
        if axis.get_xticks().size:
            axis.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(_title(run_dir), fontsize=11, x=0.01, ha="left")
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png)
    return png


def _import_figure() -> Any:
    try:
        # Figure by itself brings the Agg canvas: no display, no global state of pyplot.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"drawing needs matplotlib, which does not import: {error}",
            "pip install -e '.[report]' in the clone of mps-trainer",
        ) from None
    return Figure


def _title(run_dir: Path) -> str:
    report = summarize(run_dir)
    parts = [
        f"run {report.run_id} ({report.state}, {report.device})",
        f"{report.experiences:,} experiences in {report.batches:,} batches",
        f"{report.steps:,} steps",
    ]
    if report.restarts:
        parts.append(f"{report.restarts} restart{'s' if report.restarts > 1 else ''}")
    return "   |   ".join(parts)


def _draw_loss(axis: Any, batches: list[Line]) -> None:
    trained = [line for line in batches if line.get("loss") is not None]
    axis.set_title("Training loss", loc="left", fontsize=10)
    axis.set_xlabel("training step")
    if not trained:
        _say(axis, "no training step yet")
        return
    axis.plot(column(trained, "step"), column(trained, "loss"), color=_BLUE, marker="o", markersize=2.5, linewidth=1.3)
    axis.set_ylabel("mean loss of a batch's steps")
    axis.set_ylim(0, 1.08 * max(column(trained, "loss")) or 1)


def _draw_auc(axis: Any, batches: list[Line]) -> None:
    axis.set_title("AUC before training on the batch", loc="left", fontsize=10)
    axis.set_xlabel("batch")
    if all(line.get("auc") is None for line in batches):
        _say(axis, "the task predicts nothing that can be checked")
        return
    x = column(batches, "batch")
    axis.axhline(0.5, color=_GREY, linewidth=1, linestyle="--", label="chance")
    axis.plot(x, column(batches, "auc"), color=_ORANGE, marker="o", markersize=2.5, linewidth=0.7, label="this batch")
    axis.plot(x, column(batches, "auc_window"), color=_BLUE, linewidth=2, label="last 1,024 experiences")
    axis.set_ylim(min(0.4, *(value for value in column(batches, "auc") if value == value)), 1.01)
    axis.legend(loc="lower right", fontsize=8, frameon=False)


def _draw_scores(axis: Any, batches: list[Line]) -> None:
    axis.set_title("Scores given to experiences", loc="left", fontsize=10)
    axis.set_xlabel("batch")
    scored = [line for line in batches if line.get("scores")]
    if not scored:
        _say(axis, "no scores were asked for (use: feed)")
        return
    x = column(scored, "batch")
    low, quarter, middle, three, high = zip(*(line["scores"] for line in scored), strict=True)
    axis.fill_between(x, low, high, color=_GREEN, alpha=0.18, linewidth=0, label="5 % to 95 %")
    axis.fill_between(x, quarter, three, color=_GREEN, alpha=0.35, linewidth=0, label="25 % to 75 %")
    axis.plot(x, middle, color=_GREEN, linewidth=1.8, marker="o", markersize=2.5, label="median")
    # Room for the legend above the band.
    axis.set_ylim(min(low) - 0.02, max(high) + 0.25 * (max(high) - min(low) + 0.02))
    axis.legend(loc="upper right", fontsize=8, frameon=False, ncols=3)


def _draw_drops(axis: Any, batches: list[Line], operator: list[Line]) -> None:
    axis.set_title("Experiences dropped", loc="left", fontsize=10)
    axis.set_ylabel("experiences in a batch")
    filtered = [len(line.get("dropped") or []) for line in operator]
    axis.set_xlabel("batch")
    lost = _increments([sum((line.get("dropped") or {}).values()) for line in batches])
    if not any(filtered) and not any(lost):
        _say(axis, "none")
        return
    if any(filtered):
        axis.bar(range(1, len(filtered) + 1), filtered, color=_RED, width=0.8, label="by the filter, on purpose")
    if any(lost):
        full = [(batch, count) for batch, count in zip(column(batches, "batch"), lost, strict=True) if count]
        axis.plot(*zip(*full, strict=True), "kx", markersize=6, label="lost on the way: the ring was full")
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.set_ylim(0, 1.25 * max([*filtered, *lost]))
    axis.legend(loc="upper left", fontsize=8, frameon=False)


def _increments(totals: list[int]) -> list[int]:
    return [after - before for before, after in zip([0, *totals], totals, strict=False)]


def _say(axis: Any, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes, color=_GREY)
    axis.set_xticks([])
    axis.set_yticks([])
