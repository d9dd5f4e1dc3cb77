"""The charts of a run's page. Each gives an SVG, or a sentence that says why there is nothing to draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mps_trainer.report.chart_parts import (
    Chart,
    Data,
    batch_numbers,
    draw_line,
    legend_above,
    lines_with,
    whole_numbers,
)
from mps_trainer.report.over_time import learning_rate, memory, timeline
from mps_trainer.report.series import column
from mps_trainer.report.summary import rule_of
from mps_trainer.report.svg import BLUE, GREEN, INK, ORANGE, PURPLE, RED, SOFT, Drawing

_MOST_RULES = 4
_MOST_BARS = 60


def draw_charts(data: Data) -> list[Chart]:
    """All charts, in the order of the page."""
    makers: tuple[Callable[[Data], Chart | None], ...] = (
        _loss, _auc, _rewards, _scores, _drops, _backlog, _latency, _age, memory, learning_rate, timeline,
    )  # fmt: skip
    return [chart for chart in (make(data) for make in makers) if chart is not None]


def _loss(data: Data) -> Chart:
    title, caption = "Training loss", "Mean over the steps of a batch."
    lines = lines_with(data.batches, "loss")
    if not lines:
        return Chart(title, caption, nothing="No training step yet.")
    drawing = Drawing("loss")
    with drawing as axis:
        draw_line(axis, column(lines, "step"), column(lines, "loss"), BLUE)
        axis.set_xlabel("training step")
        axis.set_ylim(0, 1.08 * max(column(lines, "loss")) or 1)
        whole_numbers(axis)
    return Chart(title, caption, drawing.svg)


def _auc(data: Data) -> Chart:
    title = "AUC"
    caption = "On experiences that the model has not trained on yet: 0.5 is chance, 1 is perfect."
    lines = lines_with(data.batches, "auc")
    if not lines:
        return Chart(title, caption, nothing="The task predicts nothing that can be checked, or no batch could be.")
    drawing = Drawing("auc")
    with drawing as axis:
        axis.axhline(0.5, color=SOFT, linewidth=1, linestyle="--")
        x = column(lines, "batch")
        draw_line(axis, x, column(lines, "auc"), ORANGE, "each batch", width=0.8)
        draw_line(axis, x, column(lines, "auc_window"), BLUE, "last 1,024 experiences", width=2, marker=False)
        axis.set_xlabel("batch")
        axis.set_ylim(min(0.4, *column(lines, "auc")), 1.02)
        legend_above(axis)
        whole_numbers(axis)
    return Chart(title, caption, drawing.svg)


def _rewards(data: Data) -> Chart:
    title = "Rewards before and after the operator"
    caption = "Mean of a batch."
    lines = [line for line in data.operator if line.get("rewards") and line.get("rewards_kept")]
    if not lines:
        return Chart(title, caption, nothing="No rewards were recorded.")
    x = batch_numbers(data.operator, lines)
    low, quarter, _, three, high = zip(*(line["rewards"] for line in lines), strict=True)
    drawing = Drawing("rewards")
    with drawing as axis:
        # Of rewards that are 0 or 1 the middle half is everything, and says nothing.
        if (low, high) != (quarter, three):
            caption += " The band holds the middle half of the rewards as they came."
            axis.fill_between(x, quarter, three, color=SOFT, alpha=0.15, linewidth=0)
        draw_line(axis, x, column(lines, "reward_mean"), SOFT, "as they came")
        draw_line(axis, x, column(lines, "reward_mean_kept"), BLUE, "as they go on")
        axis.set_xlabel("batch")
        legend_above(axis)
        whole_numbers(axis)
    return Chart(title, caption, drawing.svg)


def _scores(data: Data) -> Chart:
    title = "Scores"
    caption = "The distribution of the scores in each batch. A high score means: drop me (use: filter)."
    lines = [line for line in data.batches if line.get("scores")]
    if not lines:
        return Chart(
            title, caption, nothing="The sidecar was asked for no scores (use: feed, or score_where: operator)."
        )
    x = column(lines, "batch")
    low, quarter, middle, three, high = zip(*(line["scores"] for line in lines), strict=True)
    drawing = Drawing("scores")
    with drawing as axis:
        axis.fill_between(x, low, high, color=GREEN, alpha=0.18, linewidth=0, label="5 to 95 %")
        axis.fill_between(x, quarter, three, color=GREEN, alpha=0.35, linewidth=0, label="25 to 75 %")
        draw_line(axis, x, list(middle), GREEN, "median")
        limits = lines_with(data.operator, "filter_limit")
        if limits:
            at = batch_numbers(data.operator, limits)
            axis.plot(
                at, column(limits, "filter_limit"), color=RED, linestyle="", marker="_", label="dropped from here"
            )
        axis.set_xlabel("batch")
        legend_above(axis, columns=2)
        whole_numbers(axis)
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
    widths = [0.8 * len(group) for group in groups]
    drawing = Drawing("drops")
    with drawing as axis:
        base = [0.0] * len(groups)
        for rule, colour in zip(rules, (RED, ORANGE, PURPLE, BLUE), strict=False):
            heights = [sum(count[rule] for count in group) / len(group) for group in groups]
            axis.bar(x, heights, bottom=base, color=colour, width=widths, label=rule)
            base = [a + b for a, b in zip(base, heights, strict=True)]
        axis.set_xlabel("batch")
        legend_above(axis)
        whole_numbers(axis, both=size == 1)
    return Chart(title, caption if size == 1 else f"{caption} A bar is the mean of {size} batches.", drawing.svg)


def _backlog(data: Data) -> Chart:
    title = "Backlog and losses"
    caption = "Records that wait after a batch's steps; experiences that found no room in the ring, so far."
    lines = lines_with(data.batches, "backlog")
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
        whole_numbers(axis, both=True)
    return Chart(title, caption if any(lost) else f"{caption} None was lost.", drawing.svg)


def _latency(data: Data) -> Chart:
    title, caption = "Score latency", "From a request for scores to the scores, as the operator saw it."
    # With scores of the operator's own there is no wait, only what they took.
    name = "score_latency_ms" if lines_with(data.operator, "score_latency_ms") else "score_wait_ms"
    lines = lines_with(data.operator, name)
    if not lines:
        return Chart(title, caption, nothing="No scores were asked for (use: feed), or none came.")
    waits = column(lines, name)
    ordered = sorted(waits)
    drawing = Drawing("latency")
    with drawing as axis:
        axis.plot(batch_numbers(data.operator, lines), waits, color=BLUE, linestyle="", marker="o", markersize=3)
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
        legend_above(axis)
        whole_numbers(axis)
    return Chart(title, caption, drawing.svg)


def _age(data: Data) -> Chart | None:
    lines = lines_with(data.operator, "score_age_s")
    if not lines:
        return None
    drawing = Drawing("age")
    with drawing as axis:
        draw_line(axis, batch_numbers(data.operator, lines), column(lines, "score_age_s"), PURPLE)
        axis.set_xlabel("batch")
        axis.set_ylabel("s")
        axis.set_ylim(bottom=0)
        whole_numbers(axis)
    return Chart("Score age", "How old the model was that gave a batch's scores.", drawing.svg)
