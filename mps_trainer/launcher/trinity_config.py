"""Read the user's Trinity YAML: our operator's block and the few keys of Trinity that a launch depends on.

Only what is needed is resolved, so that an interpolation that only Trinity's actors can resolve does not matter.
Defaults are those of trinity-rft 0.6.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]

from mps_trainer.config import Settings, load_settings
from mps_trainer.errors import ConfigError

OPERATORS_KEY = "data_processor.experience_pipeline.operators"
OPERATOR_NAME = "mps_trainer.operator.AuxTrainer"
OPERATOR_NAMES = (OPERATOR_NAME, "aux_trainer")

OPERATOR_LINES = f"""data_processor:
  experience_pipeline:
    operators:
      - name: {OPERATOR_NAME}
        args: {{task: preference_classifier, use: feed}}"""


@dataclass(frozen=True)
class TrinityConfig:
    """The user's file, as far as a launch depends on it. Paths are absolute.

    Attributes:
        operator_index: which entry of the operators is ours.
        ray_namespace: as Trinity computes it when the file has none.
        ray_address: `cluster.ray_address`; "auto" unless the user names a cluster.
        has_cluster_shape: whether `cluster.node_num` or `cluster.gpu_per_node` is written in the file.
        total_steps: `buffer.total_steps`; None when the file leaves it open.
        trainer_steps: `trainer.total_steps`; None when the file leaves it open.
        batch_size, repeat_times, train_batch_size: tasks of a step, runs of a task (`algorithm.repeat_times`), and the
            experiences that the trainer waits for; None when the file leaves them open.
    """

    path: Path
    mode: str
    project: str
    group: str
    name: str
    checkpoint_root: Path
    ray_namespace: str
    ray_address: str
    engine_type: str
    has_cluster_shape: bool
    explorer_name: str
    trainer_name: str
    total_steps: int | None
    trainer_steps: int | None
    operator_index: int
    settings: Settings
    batch_size: int | None = None
    repeat_times: int | None = None
    train_batch_size: int | None = None

    @property
    def job_dir(self) -> Path:
        """Trinity's folder of this experiment; Trinity may append a timestamp to its name."""
        return self.checkpoint_root / self.project / self.group / self.name

    @property
    def runs_dir(self) -> Path:
        """The folder of our run folders: `run_dir`, or beside Trinity's job folder."""
        if self.settings.run_dir is not None:
            return Path(self.settings.run_dir).expanduser().absolute()
        return self.job_dir.with_name(f"{self.job_dir.name}.mps-trainer")

    @property
    def derived_path(self) -> Path:
        """Where the derived config goes: `trinity.yaml` -> `trinity.mps.yaml`."""
        return self.path.with_name(f"{self.path.stem}.mps.yaml")


def read_trinity_config(path: Path) -> TrinityConfig:
    """Read and check the user's YAML; ConfigError says what is wrong and what to do."""
    path = path.absolute()
    tree = _load(path)
    if path.name.endswith(".mps.yaml"):
        raise ConfigError(f"{path.name} is a derived config", "give the YAML that it was made from")
    index, args = _our_block(tree, path)
    settings = load_settings(args)
    config = _collect(tree, path, index, settings)
    if settings.enabled:
        _refuse_what_cannot_work(config)
    return config


def _load(path: Path) -> DictConfig:
    _require_file(path)
    try:
        tree = OmegaConf.load(path)
    except OSError as error:
        # Of a document that is a number OmegaConf says so with an OSError that has no errno.
        problem = f"cannot be read: {error.strerror}" if error.errno else "holds no mapping of keys to values"
        raise ConfigError(f"{path} {problem}", "give the path of your Trinity YAML") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply", "write it with fewer levels") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error}", "give the path of your Trinity YAML") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise ConfigError(f"{path} is no valid YAML: {error.problem} ({where})", "correct that line") from None
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path} is no valid YAML: {error}", "correct it") from None
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path} holds no mapping of keys to values", "give the path of your Trinity YAML")
    return tree


def _require_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}", "give the path of your Trinity YAML") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {path}: {reason}", "give the path of your Trinity YAML") from None
    if not stat.S_ISREG(mode):
        # A FIFO or a terminal may never end, and the file is read more than once.
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise ConfigError(f"{path} is {what}", "give the path of your Trinity YAML")


def _our_block(tree: DictConfig, path: Path) -> tuple[int, dict[str, Any]]:
    operators = _get(tree, OPERATORS_KEY, None)
    if operators is not None and not isinstance(operators, ListConfig):
        raise ConfigError(f"{OPERATORS_KEY} in {path.name} is no list", f"write it like this:\n{OPERATOR_LINES}")
    names = [str(_get(tree, f"{OPERATORS_KEY}[{index}].name", "")) for index in range(len(operators or ()))]
    ours = [index for index, name in enumerate(names) if name in OPERATOR_NAMES]
    if not ours and _get(tree, "stages", None):
        raise _stages_error(path)
    if not ours:
        there = f"; the operators there are {', '.join(names)}" if names else "; it has no operators at all"
        raise ConfigError(
            f"{path.name} has no operator {OPERATOR_NAME} at {OPERATORS_KEY}{there}",
            f"add these lines (or add ours to your list):\n{OPERATOR_LINES}",
        )
    if len(ours) > 1:
        places = " and ".join(f"operators[{index}]" for index in ours)
        raise ConfigError(
            f"{path.name} has {len(ours)} operators of ours ({places}); one run has one sidecar",
            "keep one of them, or give each its own run",
        )
    args = _get(tree, f"{OPERATORS_KEY}[{ours[0]}].args", None)
    if args is None:
        return ours[0], {}
    if not isinstance(args, DictConfig):
        raise ConfigError(f"args of {OPERATOR_NAME} in {path.name} is no mapping", "write key: value pairs under args:")
    resolved: Any = _resolve(args, f"{OPERATORS_KEY}[{ours[0]}].args")
    return ours[0], {str(key): value for key, value in resolved.items()}


def _collect(tree: DictConfig, path: Path, index: int, settings: Settings) -> TrinityConfig:
    project, group, name = (
        str(_get(tree, key, default) or "")
        for key, default in (("project", "Trinity-RFT"), ("group", ""), ("name", "rft"))
    )
    stages = _get(tree, "stages", None)
    if stages and settings.enabled:
        raise _stages_error(path)
    namespace = _get(tree, "ray_namespace", None) or "/".join(part for part in (project, group, name) if part)
    tinker = bool(_get(tree, "model.tinker.enable", False))
    return TrinityConfig(
        path=path,
        mode=str(_get(tree, "mode", "both")),
        project=project,
        group=group,
        name=name,
        checkpoint_root=Path(str(_get(tree, "checkpoint_root_dir", "") or "")).absolute(),
        ray_namespace=str(namespace),
        ray_address=str(_get(tree, "cluster.ray_address", "auto") or "auto"),
        engine_type="tinker" if tinker else str(_get(tree, "explorer.rollout_model.engine_type", "vllm")),
        has_cluster_shape=any(_get(tree, f"cluster.{key}", None) for key in ("node_num", "gpu_per_node")),
        explorer_name=str(_get(tree, "explorer.name", "explorer")),
        trainer_name=str(_get(tree, "trainer.name", "trainer")),
        total_steps=_steps(tree, "buffer.total_steps"),
        trainer_steps=_steps(tree, "trainer.total_steps"),
        operator_index=index,
        settings=settings,
        batch_size=_steps(tree, "buffer.batch_size"),
        repeat_times=_steps(tree, "algorithm.repeat_times"),
        train_batch_size=_steps(tree, "buffer.train_batch_size"),
    )


def _refuse_what_cannot_work(config: TrinityConfig) -> None:
    if config.mode in ("train", "bench"):
        why = "only reads stored experiences" if config.mode == "train" else "only evaluates"
        raise ConfigError(
            f"mode: {config.mode} {why}, so no operator ever sees a batch and a sidecar would wait for nothing",
            "use mode: explore or both, or set enabled: false in the operator's args",
        )
    for key in ("run_file", "run_host", "record_only"):
        if getattr(config.settings, key) in (None, False):
            continue
        raise ConfigError(
            f"{key} is set in {config.path.name}; the launcher sets it, and only in the derived config",
            "remove that line",
        )


def _stages_error(path: Path) -> ConfigError:
    return ConfigError(
        f"{path.name} has stages: each stage of Trinity has its own pipeline and its own names, and stages are "
        "not supported",
        "make one YAML per stage (a stage's keys override the top-level ones) and run them one after the other",
    )


def _steps(tree: DictConfig, key: str) -> int | None:
    value = _get(tree, key, None)
    if value and not isinstance(value, int):
        raise ConfigError(f"{key} is {value!r}; a number of steps is needed", "write a whole number")
    return int(value) if value else None


def _get(tree: DictConfig, key: str, default: object) -> Any:
    try:
        value = OmegaConf.select(tree, key, default=default)
    except OmegaConfBaseException as error:
        raise _unresolved(key, error) from None
    return default if value is None else value


def _resolve(node: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _unresolved(error.full_key or key, error) from None


def _unresolved(key: str, error: OmegaConfBaseException) -> ConfigError:
    reason = str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ").strip('"')
    return ConfigError(
        f"{key} cannot be resolved: {reason}",
        "export the variable before you start (in the shell of `ray start` too), or write the value out",
    )
