"""The arms: every way of training an auxiliary model that is compared, what it needs, and why it is left out."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mps_trainer.config import Settings
from mps_trainer.config.pace import PaceTuning
from mps_trainer.errors import ConfigError

PACE = "max_rollout_slowdown"


@dataclass(frozen=True)
class Arm:
    """One way.

    Attributes:
        trainer: "", "operator", "rest" or "sidecar".
        place: where it trains: "cpu", "gpu" (the engine's) or "own" (another one).
        mps: the sidecar and the engine are MPS clients.
        priority: of the sidecar as an MPS client: 0 as everybody, 1 lower.
        share: of the SMs in percent (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE).
        blocking: every kernel of the sidecar is waited for; without it a step is what may be in flight.
        paced: with `max_rollout_slowdown`.
        engine: which of the engines generates: "plain" or "client" (of MPS).
        more: settings of the sidecar; those of `pace_tuning` by their own names.
    """

    name: str
    what: str
    trainer: str = ""
    place: str = "cpu"
    mps: bool = False
    priority: int = 1
    share: int = 100
    blocking: bool = True
    paced: bool = False
    more: tuple[tuple[str, Any], ...] = ()

    def settings(self, slowdown: float) -> dict[str, Any]:
        """Those of a sidecar that are the arm's own."""
        # Written in either case: only some arms shall have a pace, whatever the default.
        if not self.paced:
            return {"pace": "off"}
        own = {name: value for name, value in self.more if name not in PaceTuning.model_fields}
        tuning = {name: value for name, value in self.more if name in PaceTuning.model_fields}
        return {"pace": "on", PACE: slowdown, **own, "pace_tuning": tuning}

    @property
    def engine(self) -> str:
        """Membership is fixed when an engine starts, so each kind has its own."""
        return "client" if self.mps else "plain"


ARMS = (
    Arm("none", "no trainer: the solo rollout that the others are compared with"),
    Arm("none-client", "no trainer, the engine an MPS client: what MPS alone costs", place="gpu", mps=True),
    Arm("cpu-in-operator", "today: the operator trains in its own process, on the CPU", "operator"),
    Arm("rest-cpu", "today's advice: a FastAPI service on the CPU", "rest"),
    Arm("sidecar-cpu", "the sidecar on the CPU, through the ring", "sidecar"),
    Arm("rest-gpu", "today's advice: a FastAPI service on the engine's GPU, time slices", "rest", "gpu"),
    Arm("own-gpu", "the sidecar on a GPU of its own, which is one engine less", "sidecar", "own"),
    Arm("time-slices", "the sidecar on the engine's GPU without MPS", "sidecar", "gpu"),
    Arm("mps-plain", "MPS as everybody does it: same priority, no bound", "sidecar", "gpu", True, 0, blocking=False),
    Arm("mps-low", "MPS, the sidecar with low priority", "sidecar", "gpu", True),
    Arm("mps-pace", f"MPS, low priority and our pace ({PACE})", "sidecar", "gpu", True, paced=True),
)
BY_NAME = {arm.name: arm for arm in ARMS}
#: Of a variant, how its sidecar is a client; the rest are settings of the pace.
_CLIENT = ("share", "blocking")


def find_arm(name: str) -> Arm:
    """The arm of a name in a result; a variant is of the kind that it varies."""
    return BY_NAME[name.partition("@")[0]]


def variants(texts: Sequence[str], common: Sequence[str]) -> list[Arm]:
    """The paced arms: with the settings of `common` ("key=value"), and each NAME:key=value,... of `texts` beside it."""
    paced = BY_NAME["mps-pace"]
    shared = tuple(map(_setting, common))
    if (client := next((name for name, _ in shared if name in _CLIENT), None)) is not None:
        raise ConfigError(f"{client} is no setting of the pace", f"write --pace-variant NAME:{client}=...")
    return [replace(paced, more=shared), *(_variant(replace(paced, more=shared), text) for text in texts)]


def low_variants(texts: Sequence[str]) -> list[Arm]:
    """The arm `mps-low`, and each NAME:share=25,blocking=false of `texts` beside it."""
    low = BY_NAME["mps-low"]
    return [low, *(_variant(low, text) for text in texts)]


def _variant(base: Arm, text: str) -> Arm:
    name, _, pairs = text.partition(":")
    found = [_setting(pair) for pair in pairs.split(",") if pair]
    client = {key: value for key, value in found if key in _CLIENT}
    more = base.more + tuple(pair for pair in found if pair[0] not in _CLIENT)
    share = client.get("share", 100)
    if isinstance(share, bool) or not isinstance(share, int) or not 1 <= share <= 100:
        raise ConfigError(f"{text!r}: share is {share!r}", "give percent of the SMs, a whole number from 1 to 100")
    if not isinstance(client.get("blocking", True), bool):
        raise ConfigError(f"{text!r}: blocking is {client['blocking']!r}", "write true or false")
    if len(more) > len(base.more) and not base.paced:
        raise ConfigError(f"{text!r}: {base.name} has no pace", f"its keys are {' and '.join(_CLIENT)}")
    return replace(base, name=f"{base.name}@{name}", what=f"{base.what}; {pairs}", more=more, **client)


def _setting(pair: str) -> tuple[str, Any]:
    name, equals, value = pair.strip().partition("=")
    if not equals or name not in {*Settings.model_fields, *PaceTuning.model_fields, *_CLIENT}:
        known = ", ".join(["max_rollout_slowdown", "min_steps_per_batch", *PaceTuning.model_fields, *_CLIENT])
        raise ConfigError(f"there is no setting of the pace {pair!r}", f"write key=value; keys are {known}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@dataclass(frozen=True)
class Here:
    """What this machine and this installation have.

    Attributes:
        gpus: of this machine that the benchmark may use.
        no_mps: why MPS is not possible; "" when it is.
    """

    gpus: int = 0
    no_mps: str = "there is no GPU"
    vllm: bool = False
    fastapi: bool = False
    pace: bool = False

    @classmethod
    def look(cls, gpus: int, no_mps: str) -> Here:
        """Look at what can be imported."""
        has = {name: importlib.util.find_spec(name) is not None for name in ("vllm", "fastapi", "uvicorn")}
        return cls(gpus, no_mps, has["vllm"], has["fastapi"] and has["uvicorn"], PACE in Settings.model_fields)


def why_not(arm: Arm, here: Here, *, tiny: bool) -> str:
    """Why an arm cannot run here; "" when it can."""
    if arm.place != "cpu" and tiny:
        return "the tiny engine runs on the CPU: there is no GPU to share"
    if arm.place != "cpu" and not here.gpus:
        return "there is no GPU"
    if arm.place == "own" and here.gpus < 2:
        return "it needs a second GPU"
    if arm.mps and here.no_mps:
        return f"MPS is not possible: {here.no_mps}"
    if arm.trainer == "rest" and not here.fastapi:
        return "FastAPI is not installed: pip install fastapi uvicorn"
    if arm.paced and not here.pace:
        return f"this version of mps-trainer has no setting {PACE}"
    return ""


def choose(
    names: list[str] | None, here: Here, *, tiny: bool, instead: Sequence[Arm] = ()
) -> tuple[list[Arm], dict[str, str]]:
    """The arms that run, in the order of the table, and those left out with the reason.

    The solo rollout is always among them. ConfigError: an unknown name, or nothing to compare.

    Args:
        instead: variants, with the arm that they vary first among its own; they take its place.
    """
    unknown = [name for name in names or () if name not in BY_NAME]
    if unknown:
        raise ConfigError(f"there is no arm {unknown[0]!r}", f"the arms are {', '.join(BY_NAME)}")
    wanted = [arm for arm in ARMS if names is None or arm.name in names or arm.name == "none"]
    of_kind = {arm.name: [one for one in instead if find_arm(one.name) is arm] for arm in wanted}
    wanted = [one for arm in wanted for one in (of_kind[arm.name] or (arm,))]
    left_out = {arm.name: reason for arm in wanted if (reason := why_not(arm, here, tiny=tiny))}
    chosen = [arm for arm in wanted if arm.name not in left_out]
    if not any(arm.trainer for arm in chosen):
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise ConfigError(f"no arm with a trainer can run here ({reasons})", "choose other --arms")
    return chosen, left_out


def dedicated(arms: list[Arm]) -> Arm:
    """Whose trainer alone is what the others' steps are compared with: the best place that there is, no sharing."""
    order = ("time-slices", "own-gpu", "mps-low", "mps-plain", "mps-pace", "rest-gpu", "sidecar-cpu")
    with_trainer = {arm.name: arm for arm in arms if arm.trainer}
    for name in order:
        if name in with_trainer:
            return with_trainer[name]
    return next(iter(with_trainer.values()))
