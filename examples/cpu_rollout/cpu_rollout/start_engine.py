"""Start or stop the CPU rollout engines that a Trinity YAML needs: python -m cpu_rollout.start_engine up|down YAML

The YAML must set `ray_namespace` and `explorer.rollout_model.engine_type: external`. The engines are detached actors
of the Ray cluster that RAY_ADDRESS names, and live until `down` or the end of that cluster.
"""

from __future__ import annotations

import argparse
import logging
import os
from copy import deepcopy
from typing import Any

import ray
from trinity.common.config import Config, load_config

from cpu_rollout.engine import CpuRolloutModel

#: Keys that Trinity copies from `model` to `explorer.rollout_model`, in a step that needs the cluster.
INHERITED = (
    "model_path",
    "temperature",
    "top_p",
    "top_k",
    "logprobs",
    "max_model_len",
    "max_prompt_tokens",
    "max_response_tokens",
    "enable_prompt_truncation",
)


def engine_configs(config: Config) -> list[Any]:
    """One engine config per rollout engine, each with the actor name that the workflow runners look up."""
    rollout = config.explorer.rollout_model
    if rollout.engine_type != "external" or not config.ray_namespace:
        raise SystemExit("the YAML must set ray_namespace and explorer.rollout_model.engine_type: external")
    configs = []
    for engine_id in range(rollout.engine_num):
        engine = deepcopy(rollout)
        for key in INHERITED:
            if getattr(engine, key) is None:
                setattr(engine, key, getattr(config.model, key))
        engine.engine_id = engine_id
        engine.ray_actor_name = f"{config.explorer.name}_rollout_model_{engine_id}_0"
        configs.append(engine)
    return configs


def up(config: Config) -> None:
    """Start the engines and wait until each has its model."""
    actors = []
    for engine in engine_configs(config):
        options = ray.remote(CpuRolloutModel).options(
            name=engine.ray_actor_name,
            namespace=config.ray_namespace,
            lifetime="detached",
            num_cpus=0,
            num_gpus=0,
        )
        actors.append(options.remote(engine))
    ray.get([actor.prepare.remote() for actor in actors], timeout=120)


def down(config: Config) -> None:
    """Stop the engines; those that are gone already are none of our business."""
    running = {(actor["namespace"], actor["name"]) for actor in ray.util.list_named_actors(all_namespaces=True)}
    for engine in engine_configs(config):
        if (config.ray_namespace, engine.ray_actor_name) in running:
            ray.kill(ray.get_actor(engine.ray_actor_name, namespace=config.ray_namespace))


def main() -> None:
    """Connect to the running cluster and do as told."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("config", help="the Trinity YAML")
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    ray.init(
        address=os.environ.get("RAY_ADDRESS", "auto"),
        namespace=config.ray_namespace,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    {"up": up, "down": down}[arguments.action](config)
    print(f"engine: {arguments.action}, namespace {config.ray_namespace}")


if __name__ == "__main__":
    main()
