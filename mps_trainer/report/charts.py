"""The charts of a run's page. Each gives an SVG, or a sentence that says why there is nothing to draw."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mps_trainer.report.history import History
from mps_trainer.report.series import Line, column
from mps_trainer.report.summary import rule_of
from mps_trainer.report.svg import BLUE, GREEN, GRID, INK, ORANGE, PURPLE, RED, SOFT, Drawing

_MIB = 2**20
_MOST_RULES = 4
_MARKERS_UP_TO = 60
_MOST_BARS = 60


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


def draw_charts(data: Data) -> list[Chart]:
    """All charts, in the order of the page."""
    makers: tuple[Callable[[Data], Chart | None], ...] = (
        _loss, _auc, _rewards, _scores, _drops, _backlog, _latency, _age, _memory, _learning_rate, _timeline,
    )  # fmt: skip
    return [chart for chart in (make(data) for make in makers) if chart is not None]


def _loss(data: Data) -> Chart:
    title, caption = "Training loss", "Mean over the steps of a batch."
    lines = _with(data.batches, "loss")
    if not lines:
        return Chart(title, caption, nothing="No training step yet.")
    drawing = Drawing("loss")
    with drawing as axis:
        _line(axis, column(lines, "step"), column(lines, "loss"), BLUE)
        axis.set_xlabel("training step")
        axis.set_ylim(0, 1.08 * max(column(lines, "loss")) or 1)
        _whole_numbers(axis)
    return Chart(title, caption, drawing.svg)


def _auc(data: Data) -> Chart:
    title = "AUC"
    caption = "On experiences that the model has not trained on yet: 0.5 is chance, 1 is perfect."
    lines = _with(data.batches, "auc")
    if not lines:
        return Chart(title, caption, nothing="The task predicts nothing that can be checked, or no batch could be.")
    drawing = Drawing("auc")
    with drawing as axis:
        axis.axhline(0.5, color=SOFT, linewidth=1, linestyle="--")
        x = column(lines, "batch")
        _line(axis, x, column(lines, "auc"), ORANGE, "each batch", width=0.8)
        _line(axis, x, column(lines, "auc_window"), BLUE, "last 1,024 experiences", width=2, marker=False)
        axis.set_xlabel("batch")
        axis.set_ylim(min(0.4, *column(lines, "auc")), 1.02)
        _legend_above(axis)
        _whole_numbers(axis)
    return Chart(title, caption, drawing.svg)


def _rewards(data: Data) -> Chart:
    title = "Rewards before and after the operator"
    caption = "Mean of a batch."
    lines = [line for line in data.operator if line.get("rewards") and line.get("rewards_kept")]
    if not lines:
        return Chart(title, caption, nothing="No rewards were recorded.")
    x = _batch_numbers(data.operator, lines)
    low, quarter, _, three, high = zip(*(line["rewards"] for line in lines), strict=True)
    drawing = Drawing("rewards")
    with drawing as axis:
        # Of rewards that are 0 or 1 the middle half is everything, and says nothing.
        if (low, high) != (quarter, three):
            caption += " The band holds the middle half of the rewards as they came."
            axis.fill_between(x, quarter, three, color=SOFT, alpha=0.15, linewidth=0)
        _line(axis, x, column(lines, "reward_mean"), SOFT, "as they came")
        _line(axis, x, column(lines, "reward_mean_kept"), BLUE, "as they go on")
        axis.set_xlabel("batch")
        _legend_above(axis)
        _whole_numbers(axis)
    return Chart(title, caption, drawing.svg)


def _scores(data: Data) -> Chart:
    title = "Scores"
    caption = "The distribution of the scores in each batch. A high score means: drop me (use: filter)."
    lines = [line for line in data.batches if line.get("scores")]
    if not lines:
        return Chart(title, caption, nothing="No scores were asked for (use: feed).")
    x = column(lines, "batch")
    low, quarter, middle, three, high = zip(*(line["scores"] for line in lines), strict=True)
    drawing = Drawing("scores")
    with drawing as axis:
        axis.fill_between(x, low, high, color=GREEN, alpha=0.18, linewidth=0, label="5 to 95 %")
        axis.fill_between(x, quarter, three, color=GREEN, alpha=0.35, linewidth=0, label="25 to 75 %")
        _line(axis, x, list(middle), GREEN, "median")
        limits = _with(data.operator, "filter_limit")
        if limits:
            at = _batch_numbers(data.operator, limits)
            axis.plot(
                at, column(limits, "filter_limit"), color=RED, linestyle="", marker="_", label="dropped from here"
            )
        axis.set_xlabel("batch")
        _legend_above(axis, columns=2)
        _whole_numbers(axis)
    return Chart(title, caption, drawing.svg)


def _drops(data: Data) -> Chart:
    title, caption = "Taken out by the operator", "Experiences of a batch that did not go on, by reason."
    lines = data.operator
    counts = [Counter(rule_of(str(drop.get("why", ""))) for drop in line.get("dropped") or []) for line in lines]
    total = sum(counts, Counter())
    if not total:
        return Chart(title, caption, nothing="None; the table below says why.")
    rules = [rule for rule, _ in total.most_common(_MOST_RULES)]
    # Hundreds of bars are a smear: then a bar is the mean of some batches.
    size = -(-len(counts) // _MOST_BARS)
    groups = [counts[i : i + size] for i in range(0, len(counts), size)]
    x = [1 + i * size + (len(group) - 1) / 2 for i, group in enumerate(groups)]
    drawing = Drawing("drops")
    with drawing as axis:
        base = [0.0] * len(groups)
        for rule, colour in zip(rules, (RED, ORANGE, PURPLE, BLUE), strict=False):
            heights = [sum(count[rule] for count in group) / len(group) for group in groups]
            axis.bar(x, heights, bottom=base, color=colour, width=0.8 * size, label=rule)
            base = [a + b for a, b in zip(base, heights, strict=True)]
        axis.set_xlabel("batch")
        _legend_above(axis)
        _whole_numbers(axis, both=size == 1)
    return Chart(title, caption if size == 1 else f"{caption} A bar is the mean of {size} batches.", drawing.svg)


def _backlog(data: Data) -> Chart:
    title = "Backlog and losses"
    caption = "Records that wait after a batch's steps; experiences that found no room in the ring, so far."
    lines = _with(data.batches, "backlog")
    if not lines:
        return Chart(title, caption, nothing="No batch was told of.")
    lost = [sum((line.get("dropped") or {}).values()) for line in lines]
    if not any(lost) and not any(column(lines, "backlog")):
        return Chart(title, caption, nothing="No record was waiting after any batch, and no experience was lost.")
    drawing = Drawing("backlog")
    with drawing as axis:
        x = column(lines, "batch")
        axis.step(x, column(lines, "backlog"), color=BLUE, where="mid", linewidth=1.3, label="records waiting")
        axis.set_xlabel("batch")
        axis.set_ylim(0, 1.3 * max(*column(lines, "backlog"), 1))
        if any(lost):
            other = axis.twinx()
            other.plot(x, lost, color=RED, linewidth=1.3, label="experiences lost (right)")
            other.grid(False)
            other.spines["right"].set_visible(True)
            other.set_ylim(0, 1.3 * max(lost))
            handles = [*axis.get_lines(), *other.get_lines()]
            axis.legend(handles, [str(handle.get_label()) for handle in handles], loc="upper left")
        _whole_numbers(axis, both=True)
    return Chart(title, caption if any(lost) else f"{caption} None was lost.", drawing.svg)


def _latency(data: Data) -> Chart:
    title, caption = "Score latency", "From a request for scores to the scores, as the operator saw it."
    lines = _with(data.operator, "score_wait_ms")
    if not lines:
        return Chart(title, caption, nothing="No scores were asked for (use: feed), or none came.")
    waits = column(lines, "score_wait_ms")
    ordered = sorted(waits)
    drawing = Drawing("latency")
    with drawing as axis:
        axis.plot(_batch_numbers(data.operator, lines), waits, color=BLUE, linestyle="", marker="o", markersize=3)
        for share, style in ((0.5, "-"), (0.99, "--")):
            value = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
            label = f"{'median' if share == 0.5 else 'p99'} {value:.1f} ms"
            axis.axhline(value, color=INK, linewidth=0.9, linestyle=style, label=label)
        if ordered[-1] > 20 * max(ordered[0], 1e-3):
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1.1 * ordered[-1] or 1)
        axis.set_xlabel("batch")
        axis.set_ylabel("ms")
        _legend_above(axis)
        _whole_numbers(axis)
    return Chart(title, caption, drawing.svg)


def _age(data: Data) -> Chart | None:
    lines = _with(data.operator, "score_age_s")
    if not lines:
        return None
    drawing = Drawing("age")
    with drawing as axis:
        _line(axis, _batch_numbers(data.operator, lines), column(lines, "score_age_s"), PURPLE)
        axis.set_xlabel("batch")
        axis.set_ylabel("s")
        axis.set_ylim(bottom=0)
        _whole_numbers(axis)
    return Chart("Score age", "How old the model was that gave a batch's scores.", drawing.svg)


def _memory(data: Data) -> Chart:
    title = "Memory of the sidecar"
    lines = _with(data.batches, "memory_bytes")
    if not lines:
        return Chart(title, "", nothing="Not recorded.")
    on_gpu = _with(data.batches, "gpu_memory_bytes")
    drawing = Drawing("memory")
    with drawing as axis:
        _line(axis, _minutes(data, lines), _scaled(lines, "memory_bytes"), BLUE, "resident", marker=False)
        highest = max(_scaled(lines, "memory_bytes"))
        if on_gpu:
            _line(axis, _minutes(data, on_gpu), _scaled(on_gpu, "gpu_memory_bytes"), GREEN, "tensors on the GPU (peak)")
            highest = max(highest, *_scaled(on_gpu, "gpu_memory_bytes"))
        if data.cap is not None:
            axis.axhline(data.cap / _MIB, color=RED, linestyle="--", linewidth=1, label="memory (setting)")
            highest = max(highest, data.cap / _MIB)
        axis.set_xlabel("minutes since the first batch")
        axis.set_ylabel("MiB")
        axis.set_ylim(0, 1.15 * highest)
        if on_gpu or data.cap is not None:
            _legend_above(axis)
    on_cpu = "" if on_gpu else " On the CPU the setting memory is a wish: nothing enforces it."
    return Chart(title, f"After each batch.{on_cpu}", drawing.svg)


def _learning_rate(data: Data) -> Chart | None:
    lines = _with(data.batches, "learning_rate")
    if len({line["learning_rate"] for line in lines}) < 2:
        return None
    drawing = Drawing("rate")
    with drawing as axis:
        _line(axis, column(lines, "step"), column(lines, "learning_rate"), PURPLE, marker=False)
        axis.set_xlabel("training step")
        axis.set_ylim(bottom=0)
        _whole_numbers(axis)
    return Chart("Learning rate", "As the schedule set it.", drawing.svg)


def _timeline(data: Data) -> Chart:
    title, caption = "Lives of the sidecar", "From start to READY, and from READY to its end."
    history = data.history
    if history.is_plain or not history.lives:
        return Chart(
            title, "", nothing="One sidecar, without a restart or a pause, and nothing was set aside.", wide=True
        )
    begin = history.lives[0].started
    known = [life.ended or life.ready or life.started for life in history.lives]
    end = max(known + [line["t"] for line in data.batches if "t" in line])
    drawing = Drawing("timeline", (11.2, 1.9))
    with drawing as axis:
        for life in history.lives:
            stop = life.ended or end
            ready = life.ready or stop
            axis.barh(0, (ready - life.started) / 60, left=(life.started - begin) / 60, color=ORANGE, height=0.5)
            axis.barh(0, (stop - ready) / 60, left=(ready - begin) / 60, color=GREEN, height=0.5)
        for pause in history.pauses:
            length = ((pause.end or end) - pause.begin) / 60
            axis.barh(0, length, left=(pause.begin - begin) / 60, color=GRID, height=0.5, hatch="//", edgecolor=SOFT)
        ends = [(life.ended - begin) / 60 for life in history.lives[:-1] if life.ended]
        axis.plot(ends, [0.38] * len(ends), color=RED, marker="v", linestyle="")
        aside = [(event.when - begin) / 60 for event in history.set_aside]
        axis.plot(aside, [-0.38] * len(aside), color=PURPLE, marker="x", linestyle="")
        axis.set_ylim(-0.6, 0.9)
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.set_xlabel("minutes since the start")
        _timeline_legend(axis, bool(history.pauses), bool(aside))
    return Chart(title, caption, drawing.svg, wide=True)


def _timeline_legend(axis: Any, pauses: bool, aside: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=ORANGE, label="starting"), Patch(color=GREEN, label="ready")]
    handles.append(Line2D([], [], color=RED, marker="v", linestyle="", label="died"))
    if pauses:
        handles.append(Patch(facecolor=GRID, edgecolor=SOFT, hatch="//", label="paused"))
    if aside:
        handles.append(Line2D([], [], color=PURPLE, marker="x", linestyle="", label="experiences set aside"))
    axis.legend(handles=handles, loc="upper left", ncols=len(handles))


def _line(
    axis: Any, x: list[float], y: list[float], colour: str, label: str = "", *, width: float = 1.4, marker: bool = True
) -> None:
    # Dots show single batches; hundreds of them are a smear.
    dots = {"marker": "o", "markersize": 2.5} if marker and len(x) <= _MARKERS_UP_TO else {}
    axis.plot(x, y, color=colour, linewidth=width, label=label, **dots)


def _legend_above(axis: Any, columns: int = 3) -> None:
    # Outside, where no curve can come.
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, borderaxespad=0.2, columnspacing=1.2)


def _whole_numbers(axis: Any, *, both: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if both:
        axis.yaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _with(lines: list[Line], name: str) -> list[Line]:
    return [line for line in lines if line.get(name) is not None and math.isfinite(line[name])]


def _batch_numbers(every: list[Line], some: list[Line]) -> list[float]:
    """Where each of `some` stands among all: an operator that was started again counts its batches anew."""
    number = {id(line): i for i, line in enumerate(every, 1)}
    return [float(number[id(line)]) for line in some]


def _minutes(data: Data, lines: list[Line]) -> list[float]:
    begin = min((line["t"] for line in data.batches if "t" in line), default=0.0)
    return [(line.get("t", begin) - begin) / 60 for line in lines]


def _scaled(lines: list[Line], name: str) -> list[float]:
    return [value / _MIB for value in column(lines, name)]
