"""The settings of the pace: how the sidecar yields to the rollout. See docs/pace.md."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from mps_trainer.config.schedule import only_with
from mps_trainer.config.section import Section

MIN_STEPS_PER_BATCH = 1

PACE: Any = Field(
    "off",
    description="off: every step as soon as it is due; on: train in the rollout's gaps and yield while it generates; "
    "auto: on where the sidecar shares the engine's GPU through MPS, off elsewhere",
)
MAX_ROLLOUT_SLOWDOWN: Any = Field(
    0.03, gt=0, lt=1, description="pace: how much longer the rollout may take because of the training, as a share"
)
MIN_STEPS: Any = Field(
    MIN_STEPS_PER_BATCH,
    ge=0,
    description="pace: at least so many training steps for each batch, whatever they cost the rollout",
)


class PaceTuning(Section):
    """The constants of the controller, in the open for experiments; `docs/pace.md` says what each does."""

    margin: float = Field(0.9, gt=0, le=1, description="of max_rollout_slowdown so much is spent")
    presumed: float = Field(0.25, gt=0, description="slowdown while training, presumed until it is measured")
    fixed: float | None = Field(
        None, gt=0, description="slowdown while training, taken for granted instead of measured: a fixed share of time"
    )
    window_iterations: int = Field(10, ge=1, description="length of a window, in iterations of the engine")
    shortest_window: float = Field(0.06, gt=0, description="seconds of the shortest window")
    longest_window: float = Field(0.5, gt=0, description="seconds of the longest window, unless two steps take longer")
    debt: float = Field(10.0, ge=0, description="seconds of the rollout that a debt is held against training for")
    probe_every: float = Field(20.0, ge=1, description="windows without a stop before one that only compares")
    silent: float = Field(1.0, gt=0, description="seconds after which an engine that says nothing counts as idle")
    pause_on_prefill: bool = Field(
        False, description="no step after an iteration that computed prompts, until one computes none"
    )
    owed_batches: int = Field(8, ge=1, description="batches whose steps may wait; older steps are skipped")

    @model_validator(mode="after")
    def _all_have_a_say(self) -> PaceTuning:
        if self.shortest_window > self.longest_window:
            raise ValueError(
                f"pace_tuning.shortest_window is {self.shortest_window:g} and longest_window {self.longest_window:g}; "
                "lower the one or raise the other"
            )
        if self.fixed is not None and self.presumed != type(self).model_fields["presumed"].default:
            raise ValueError(
                f"pace_tuning.presumed is {self.presumed:g}, but fixed {self.fixed:g} is never measured, so nothing is "
                "presumed; remove the one or the other"
            )
        return self


TUNING: Any = Field(PaceTuning(), description="constants of the pace, for experiments (docs/pace.md)")


def is_paced(pace: str, mps: str) -> bool:
    """Whether a run is paced.

    Args:
        pace: the setting.
        mps: "on" or "off", as the plan resolved it.
    """
    return pace == "on" or (pace == "auto" and mps == "on")


def check_pace(settings: Section, train: str) -> None:
    """ValueError for settings of the pace that have no say, or for a floor above what falls due at all.

    Args:
        settings: all settings of the operator.
        train: `schedule.train`.
    """
    found: Any = settings
    if found.pace == "off":
        names = ("max_rollout_slowdown", "min_steps_per_batch", "pace_tuning")
        only_with("", settings, "pace", "on or auto", names)
    floor, most = found.min_steps_per_batch, found.steps_per_batch
    if floor == MIN_STEPS_PER_BATCH:
        return
    if train == "continuous":
        raise ValueError(
            f"min_steps_per_batch is {floor}, but with schedule.train: continuous no step falls due with a batch; "
            "remove it, or write train: steps or epochs"
        )
    if train == "steps" and floor > most:
        raise ValueError(
            f"min_steps_per_batch is {floor}, but only steps_per_batch {most} fall due with a batch; "
            "lower the one or raise the other"
        )
