"""The charts over time: memory, learning rate, the lives of the sidecar."""

from __future__ import annotations

from typing import Any

from mps_trainer.report.chart_parts import Chart, Data, draw_line, legend_above, lines_with, whole_numbers
from mps_trainer.report.series import Line, column
from mps_trainer.report.svg import BLUE, GREEN, GRID, ORANGE, PURPLE, RED, SOFT, Drawing

_MIB = 2**20


def memory(data: Data) -> Chart:
    """Resident size, tensors on the GPU, and the setting."""
    title = "Memory of the sidecar"
    lines = lines_with(data.batches, "memory_bytes")
    if not lines:
        return Chart(title, "", nothing="Not recorded.")
    on_gpu = lines_with(data.batches, "gpu_memory_bytes")
    drawing = Drawing("memory")
    with drawing as axis:
        draw_line(axis, _minutes(data, lines), _scaled(lines, "memory_bytes"), BLUE, "resident", marker=False)
        highest = max(_scaled(lines, "memory_bytes"))
        if on_gpu:
            draw_line(
                axis, _minutes(data, on_gpu), _scaled(on_gpu, "gpu_memory_bytes"), GREEN, "tensors on the GPU (peak)"
            )
            highest = max(highest, *_scaled(on_gpu, "gpu_memory_bytes"))
        if data.cap is not None:
            axis.axhline(data.cap / _MIB, color=RED, linestyle="--", linewidth=1, label="memory (setting)")
            highest = max(highest, data.cap / _MIB)
        axis.set_xlabel("minutes since the first batch")
        axis.set_ylabel("MiB")
        axis.set_ylim(0, 1.15 * highest)
        if on_gpu or data.cap is not None:
            legend_above(axis)
    on_cpu = "" if on_gpu else " On the CPU the setting memory is a wish: nothing enforces it."
    return Chart(title, f"After each batch.{on_cpu}", drawing.svg)


def learning_rate(data: Data) -> Chart | None:
    """None unless it changed."""
    lines = lines_with(data.batches, "learning_rate")
    if len({line["learning_rate"] for line in lines}) < 2:
        return None
    drawing = Drawing("rate")
    with drawing as axis:
        draw_line(axis, column(lines, "step"), column(lines, "learning_rate"), PURPLE, marker=False)
        axis.set_xlabel("training step")
        axis.set_ylim(bottom=0)
        whole_numbers(axis)
    return Chart("Learning rate", "As the schedule set it.", drawing.svg)


def timeline(data: Data) -> Chart:
    """Starts, deaths, pauses, and what was set aside."""
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


def _minutes(data: Data, lines: list[Line]) -> list[float]:
    begin = min((line["t"] for line in data.batches if "t" in line), default=0.0)
    return [(line.get("t", begin) - begin) / 60 for line in lines]


def _scaled(lines: list[Line], name: str) -> list[float]:
    return [value / _MIB for value in column(lines, name)]
