"""The settings of the replay buffer's draws and of the training schedule: see docs/replay_and_schedule.md.

A setting that has no say beside the others is refused: what a user wrote never goes unheard. Only values that differ
from the default can be told from those that nobody wrote, for the run file holds every setting.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from mps_trainer.config.section import Section

STEPS_PER_BATCH = 4


class ReplaySettings(Section):
    """How training batches are drawn from the replay buffer."""

    sampling: Literal["uniform", "recency", "priority"] = Field(
        "uniform",
        description="uniform: all alike; recency: newer experiences more often; "
        "priority: those with a high loss more often (the task needs losses())",
    )
    half_life: int | None = Field(
        None,
        ge=1,
        description="recency: an experience that is so many experiences older than another is drawn half as often; "
        "default: a quarter of replay_capacity",
    )
    priority_exponent: float = Field(
        0.6, ge=0, le=1, description="priority: chances go with this power of the loss; 0 draws uniformly"
    )
    importance_exponent: float = Field(
        0.4, ge=0, le=1, description="priority: how far importance weights undo the bias of the draws; 1: wholly"
    )
    class_balance: bool = Field(
        False, description="draw the same number from each class that the buffer holds; the task's classes() tells them"
    )

    @model_validator(mode="after")
    def _all_have_a_say(self) -> ReplaySettings:
        only_with("replay", self, "sampling", "recency", ("half_life",))
        only_with("replay", self, "sampling", "priority", ("priority_exponent", "importance_exponent"))
        return self


class ScheduleSettings(Section):
    """When training steps are taken, and with which learning rate."""

    train: Literal["steps", "epochs", "continuous"] = Field(
        "steps",
        description="steps: steps_per_batch after each batch; epochs: passes over each new batch; "
        "continuous: whenever there is nothing else to do",
    )
    train_every: int = Field(1, ge=1, description="steps, epochs: train after every so many batches only")
    epochs: int = Field(1, ge=1, description="epochs: passes over the experiences that are new since the last training")
    max_replays: float = Field(
        8.0, gt=0, description="continuous: wait once the experiences held were drawn so many times each, on average"
    )
    rate: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the task's learning rate changes over rate_steps, after the warm-up"
    )
    rate_warmup: int = Field(0, ge=0, description="steps in which the learning rate rises to its full value")
    rate_steps: int | None = Field(
        None, ge=1, description="linear, cosine: the step, warm-up included, from which on rate_end holds"
    )
    rate_end: float = Field(0.1, ge=0, le=1, description="linear, cosine: the share of the learning rate that is left")

    @model_validator(mode="after")
    def _all_have_a_say(self) -> ScheduleSettings:
        only_with("schedule", self, "train", "epochs", ("epochs",))
        only_with("schedule", self, "train", "continuous", ("max_replays",))
        if self.train == "continuous" and self.train_every != 1:
            raise ValueError("schedule.train_every goes with train: steps or epochs; remove it or train: continuous")
        if self.rate == "constant":
            only_with("schedule", self, "rate", "linear or cosine", ("rate_steps", "rate_end"))
        elif self.rate_steps is None:
            raise ValueError(f"schedule.rate is {self.rate}, but there is no rate_steps; write after how many it ends")
        elif self.rate_warmup >= self.rate_steps:
            raise ValueError(
                f"schedule.rate_warmup is {self.rate_warmup} of rate_steps {self.rate_steps}, which leaves no step to "
                "decay in; lower the one or raise the other"
            )
        return self


class _Scheduled(Protocol):
    @property
    def steps_per_batch(self) -> int: ...
    @property
    def min_experiences(self) -> int: ...
    @property
    def replay_capacity(self) -> int: ...
    @property
    def replay(self) -> ReplaySettings: ...
    @property
    def schedule(self) -> ScheduleSettings: ...


def check_schedule(settings: _Scheduled) -> None:
    """ValueError when settings of several groups contradict each other."""
    train = settings.schedule.train
    if train != "steps" and settings.steps_per_batch != STEPS_PER_BATCH:
        limit = "schedule.epochs" if train == "epochs" else "schedule.max_replays"
        raise ValueError(
            f"steps_per_batch is {settings.steps_per_batch}, but schedule.train is {train}: {limit} says how many "
            "steps there are; remove steps_per_batch, or write train: steps"
        )
    if train == "epochs" and (settings.replay.sampling != "uniform" or settings.replay.class_balance):
        raise ValueError(
            "schedule.train is epochs, which takes each new experience once a pass, but replay.sampling or "
            "class_balance asks for draws; remove them, or write train: steps"
        )
    if settings.min_experiences > settings.replay_capacity:
        raise ValueError(
            f"min_experiences is {settings.min_experiences} and replay_capacity {settings.replay_capacity}: training "
            "would never start; lower the one or raise the other"
        )


def only_with(section: str, found: Section, chooser: str, choice: str, names: tuple[str, ...]) -> None:
    """ValueError for a setting that differs from its default and has no say, since `chooser` is not `choice`."""
    chosen: Any = getattr(found, chooser)
    if chosen == choice:
        return
    for name in names:
        if getattr(found, name) != type(found).model_fields[name].default:
            raise ValueError(
                f"{section}{'.' if section else ''}{name} goes with {chooser}: {choice}, but {chooser} is {chosen}; "
                f"remove {name}, or write {chooser}: {choice}"
            )
