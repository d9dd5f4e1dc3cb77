"""Every setting, once: the `args` of the operator in Trinity's own YAML.

The operator gets them as keyword arguments from Trinity; the launcher reads the same block from the same file.
Both build one `Settings`, so a typo dies before anything starts. Sizes and durations carry their unit in the
value ("8GiB", "50ms").
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from mps_trainer.config.pace import MAX_ROLLOUT_SLOWDOWN, MIN_STEPS, PACE, TUNING, PaceTuning, check_pace
from mps_trainer.config.schedule import STEPS_PER_BATCH, ReplaySettings, ScheduleSettings, check_schedule, only_with
from mps_trainer.config.section import Section
from mps_trainer.config.units import parse_duration, parse_size
from mps_trainer.errors import ConfigError

Size = Annotated[int, BeforeValidator(parse_size)]
Duration = Annotated[float, BeforeValidator(parse_duration)]


def _yaml_bool_to_word(value: object) -> object:
    # YAML 1.1, which Trinity's loader speaks, reads a bare on or off as a boolean.
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


OnOrOff = Annotated[Literal["auto", "on", "off"], BeforeValidator(_yaml_bool_to_word)]


class FilterSettings(Section):
    """Which experiences `use: filter` drops. A high score means: drop me."""

    drop: Literal["quantile", "threshold", "top_k"] = Field(
        "quantile",
        description="quantile: the highest-scored share; threshold: scores above value; top_k: so many of the highest",
    )
    value: float = Field(
        0.1, description="the share to drop (quantile), the limit (threshold), or how many to drop (top_k)"
    )
    per: Literal["batch", "group"] = Field(
        "batch", description="what is compared: the whole batch, or the runs of each task among themselves"
    )
    keep_at_least: int = Field(
        1,
        ge=0,
        description="never leave fewer experiences than this in a batch (per: group: of each task); 0: all may go",
    )

    @model_validator(mode="after")
    def _value_fits(self) -> FilterSettings:
        if self.drop == "quantile" and not 0 <= self.value < 1:
            raise ValueError(f"filter.value is {self.value}; a quantile is a share from 0 to below 1, such as 0.1")
        if self.drop == "top_k" and (self.value < 0 or self.value != int(self.value)):
            raise ValueError(f"filter.value is {self.value}; top_k drops a whole number of experiences, such as 2")
        return self

    def num_in_share(self, size: int) -> int:
        """How many of `size` experiences the share `value` is (drop: quantile), rounded down."""
        # 0.29 of 100 is 28.999... in binary, and 29 to whoever wrote it.
        return int(self.value * size + 1e-9)


class RewardSettings(Section):
    """How `use: reward` corrects a reward. The raw reward stays in `experience.info["raw_reward"]`."""

    how: Literal["add", "multiply", "replace"] = Field(
        "add",
        description="add: reward + weight * score; multiply: reward * (1 + weight * score); replace: weight * score",
    )
    weight: float = Field(0.1, description="the factor on the score; negative to punish high scores")
    clip: tuple[float, float] | None = Field(
        None, description="[lowest, highest]: corrected rewards are brought into this range"
    )

    @model_validator(mode="after")
    def _clip_is_a_range(self) -> RewardSettings:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"reward.clip is {list(self.clip)}; the lowest comes first")
        return self


class Settings(Section):
    """The operator's `args`, resolved."""

    enabled: bool = Field(True, description="false leaves every experience untouched and starts nothing")
    task: str = Field("preference_classifier", description='a built-in task, or "my_pkg.my_module:MyTask"')
    task_args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the task")
    use: Literal["feed", "filter", "reward"] = Field(
        "feed", description="feed: train only; filter: drop by score; reward: correct rewards by score"
    )
    filter: FilterSettings = Field(FilterSettings(), description="for use: filter")
    reward: RewardSettings = Field(RewardSettings(), description="for use: reward")

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda:\d+)$", description="auto, cuda:<n> or cpu")
    mps: OnOrOff = Field("auto", description="share the rollout GPU through CUDA MPS")
    join: Literal["plugin", "env"] = Field(
        "plugin",
        description="how a vLLM engine becomes an MPS client: it asks (plugin), or the shell of `ray start` says (env)",
    )
    memory: Size | None = Field(
        None, gt=0, description="the sidecar's memory reservation, such as 8GiB; on the CPU a wish, not a limit"
    )
    memory_fraction: float | None = Field(None, gt=0, lt=1, description="the same as a share of the device")
    probation: OnOrOff = Field(
        "auto",
        description="try the task in a process of its own before READY, outside MPS; "
        "auto: on for a task of yours on a GPU, off for built-in tasks and on the CPU",
    )
    probation_timeout: Duration = Field(60.0, gt=0, description="the longest that probation takes")

    batch_size: int = Field(256, ge=1, le=2**24, description="experiences in one training step")
    steps_per_batch: int = Field(
        STEPS_PER_BATCH, ge=0, description="training steps after each batch from the explorer (schedule.train: steps)"
    )
    min_experiences: int = Field(32, ge=1, description="experiences in the replay buffer before training starts")
    replay_capacity: int = Field(8192, ge=1, le=2**31, description="experiences that the replay buffer keeps")
    replay_bytes: Size | None = Field(
        None,
        gt=0,
        description="bytes that the replay buffer keeps, such as 4GiB; the oldest experiences leave first",
    )
    replay: ReplaySettings = Field(ReplaySettings(), description="how training batches are drawn")
    schedule: ScheduleSettings = Field(
        ScheduleSettings(), description="when training steps are taken, and with which learning rate"
    )
    pace: OnOrOff = PACE
    pace_tuning: PaceTuning = TUNING
    max_rollout_slowdown: float = MAX_ROLLOUT_SLOWDOWN
    min_steps_per_batch: int = MIN_STEPS
    seed: int = Field(0, ge=0, lt=2**63, description="for initial weights and sampling")
    checkpoint_every: int = Field(200, ge=1, description="training steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="checkpoints kept on disk")
    cpu_threads: int = Field(
        1, ge=1, le=1024, description="threads of the sidecar on the CPU; the rollout needs the rest"
    )

    score_timeout: Duration = Field(2.0, ge=0, description="how long a batch waits for its scores")
    min_version: int = Field(50, ge=0, description="scores count once the model has taken this many steps")
    warmup_steps: int = Field(0, ge=0, description="scores count from this batch of the explorer on")
    max_staleness: Duration | None = Field(
        None,
        gt=0,
        description="scores count while the model that gave them was trained at most so long ago; older ones are "
        "treated as late; choose several times the time between two batches",
    )
    score_where: Literal["sidecar", "operator"] = Field(
        "sidecar",
        description="who computes scores: the sidecar, or the operator on its CPU from a snapshot of the weights in "
        "/dev/shm, also while the sidecar is dead",
    )
    snapshot_every: Duration = Field(
        1.0, ge=0, description="score_where: operator: the shortest time between two snapshots of the weights"
    )
    on_late: Literal["pass", "last", "drop"] = Field(
        "pass",
        description="an experience whose score is late: pass it on as it is, use the last score known, or drop it",
    )
    on_error: Literal["pass", "raise"] = Field(
        "pass", description="sidecar absent or failed: pass experiences on and count it, or stop the run"
    )

    ring_slots: int = Field(4, ge=2, le=64, description="records that the feed ring holds")
    ring_slot: Size = Field(11 * 2**20, ge=2**12, description="bytes of one record; larger batches are split")
    backpressure: Literal["drop_oldest", "drop_newest", "block"] = Field(
        "drop_oldest", description="what happens when the feed ring is full"
    )
    block_timeout: Duration = Field(0.05, ge=0, description="the longest wait of backpressure: block")

    record: str | None = Field(
        None, description="append every experience to this file (an absolute path), for `mps-trainer check-task --data`"
    )
    record_max: int = Field(2000, ge=1, description="recording ends with so many experiences in the file, or at 1 GiB")
    record_only: bool = Field(False, description="set by `mps-trainer record` in its derived config; not by you")

    prometheus_port: int | None = Field(
        None, ge=0, le=65535, description="serve metrics for Prometheus at this port of 127.0.0.1; none or 0: off"
    )
    run_dir: str | None = Field(
        None, description="where checkpoints, metrics and logs go; default: beside the checkpoints of Trinity"
    )
    ready_timeout: Duration = Field(60.0, gt=0, description="how long the launcher waits for the sidecar")
    hang_timeout: Duration = Field(
        120.0, ge=0, description="a sidecar that is silent for so long in one step or record is restarted; 0: never"
    )
    idle_timeout: Duration = Field(600.0, gt=0, description="the sidecar ends this long after its last operator")
    max_restarts: int = Field(5, ge=0, description="restarts of a killed sidecar before giving up")
    run_file: str | None = Field(None, description="set by the launcher in the derived config; not by you")
    run_host: str | None = Field(None, description="set by the launcher in the derived config; not by you")

    @model_validator(mode="after")
    def _record_is_a_whole_path(self) -> Settings:
        if self.record is not None and not Path(self.record).is_absolute():
            raise ValueError(f"record is {self.record!r}; write an absolute path: Ray starts the operator elsewhere")
        return self

    @model_validator(mode="after")
    def _run_dir_is_a_name(self) -> Settings:
        if self.run_dir is not None and not self.run_dir.strip():
            raise ValueError(f"run_dir is {self.run_dir!r}; name a folder, or leave it out")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Settings:
        check_schedule(self)
        check_pace(self, self.schedule.train)
        return self

    @model_validator(mode="after")
    def _scores_have_a_say(self) -> Settings:
        if self.use == "feed":
            only_with("", self, "use", "filter or reward", ("max_staleness", "score_where"))
        only_with("", self, "score_where", "operator", ("snapshot_every",))
        return self

    @model_validator(mode="after")
    def _one_memory_wish(self) -> Settings:
        if self.memory is not None and self.memory_fraction is not None:
            raise ValueError("memory and memory_fraction are both set; keep one of them")
        return self

    def dump(self) -> dict[str, Any]:
        """Plain JSON values of every setting, sizes in bytes and durations in seconds."""
        return self.model_dump(mode="json")


def load_settings(args: Mapping[str, Any]) -> Settings:
    """Settings from the operator's `args`; ConfigError names the key and, for a typo, the nearest valid one."""
    try:
        return Settings.model_validate(dict(args))
    except ValidationError as error:
        raise ConfigError(*_explain(error)) from None


def _explain(error: ValidationError) -> tuple[str, str]:
    messages, todos = [], []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "args"
        if item["type"] == "extra_forbidden":
            messages.append(f"unknown key {path!r}")
            todos.append(_nearest(item["loc"]))
        else:
            messages.append(
                f"{path}: {item['msg'].removeprefix('Value error, ')} (found {item['input']!r})"
                if item["loc"]
                else item["msg"].removeprefix("Value error, ")
            )
    found = "the operator's args cannot be used: " + "; ".join(messages)
    return found, " ".join(dict.fromkeys(todos)) or "correct the value; docs/settings.md lists what is valid"


def _nearest(loc: tuple[int | str, ...]) -> str:
    fields = Settings.model_fields
    section = fields[str(loc[0])].annotation if len(loc) > 1 else None
    if isinstance(section, type) and issubclass(section, Section):
        fields = section.model_fields
    close = difflib.get_close_matches(str(loc[-1]), fields, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"valid keys are {', '.join(fields)}"
