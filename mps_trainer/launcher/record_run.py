"""`mps-trainer record`: `trinity run` without a sidecar, on a derived config whose operator only records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mps_trainer.errors import AlreadyRunningError, ConfigError
from mps_trainer.launcher.derived_config import DerivedConfig, derive_with
from mps_trainer.launcher.gpu import read_gpus
from mps_trainer.launcher.run_trinity import TrinityOptions, run_without_sidecar
from mps_trainer.launcher.runs import list_runs
from mps_trainer.launcher.trinity_config import TrinityConfig, read_trinity_config
from mps_trainer.launcher.verdict import EXIT_OK, EXIT_TRINITY_FAILED, Verdict


def record_run(path: Path, target: Path, most: int, options: TrinityOptions) -> tuple[Verdict, int]:
    """Run Trinity and record into `target`; the verdict, and how many experiences the file holds.

    ConfigError: the file exists or cannot be written, or the config records already. AlreadyRunningError: a run of
    this config is alive.
    """
    config = read_trinity_config(path)
    target = target.absolute()
    derived = _derive(config, target, most)
    _refuse_beside_a_run(config)
    try:
        target.open("xb").close()
        # It will hold prompts and responses.
        target.chmod(0o600)
    except FileExistsError:
        raise ConfigError(f"{target} exists", "choose another file, or remove it: a recording starts anew") from None
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}", "choose another file") from None
    derived.write()
    options.progress(f"recording to {target}, at most {most} experiences; no sidecar")
    try:
        verdict = run_without_sidecar(config, derived.path, options)
    finally:
        derived.path.unlink(missing_ok=True)
        with target.open("rb") as file:
            count = sum(line.endswith(b"\n") for line in file)
        if not count:
            target.unlink()
    if verdict.exit_code == EXIT_OK and not count:
        return Verdict(EXIT_TRINITY_FAILED, ("no experience came by the operator",), verdict.notes), 0
    return verdict, count


def _derive(config: TrinityConfig, target: Path, most: int) -> DerivedConfig:
    for key in ("record", "record_max", "record_only"):
        if key in config.settings.model_fields_set:
            raise ConfigError(
                f"{key} is set in {config.path.name}, and `mps-trainer record` sets it",
                "remove that line, or use `mps-trainer run`, which records as well then",
            )
    ours = {"record": str(target), "record_max": most, "record_only": True}
    derived = derive_with(config, ours, one_gpu=len(read_gpus().gpus) == 1)
    # Another name than that of a run's, which may be in use on this very config.
    return replace(derived, path=config.path.with_name(f"{config.path.stem}.record.mps.yaml"))


def _refuse_beside_a_run(config: TrinityConfig) -> None:
    for view in list_runs():
        if view.record.ray_namespace == config.ray_namespace:
            raise AlreadyRunningError(
                f"run {view.record.run_id} is alive in the Ray namespace {config.ray_namespace!r}",
                f"end it first: mps-trainer down {view.record.run_id}",
            )
