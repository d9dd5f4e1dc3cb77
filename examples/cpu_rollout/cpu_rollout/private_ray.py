"""A Ray cluster of the example's own: the launcher's private one, without GPUs and with the example's environment.

    with PrivateRay(example_environment(model, work_dir)) as ray_cluster:
        subprocess.run([...], env=ray_cluster.environment)

It neither sees nor disturbs another Ray.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from mps_trainer.launcher.ray_cluster import private_ray

EXAMPLE_DIR = Path(__file__).resolve().parent.parent


def example_environment(model: Path, work_dir: Path) -> dict[str, str]:
    """The variables that Ray's processes and the driver of the example's YAMLs both need."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(EXAMPLE_DIR / "stand_ins"), str(EXAMPLE_DIR), *([inherited] if inherited else [])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "CPU_ROLLOUT_DIR": str(EXAMPLE_DIR),
        "CPU_ROLLOUT_MODEL": str(model),
        "CPU_ROLLOUT_WORK": str(work_dir),
        "TINKER_STAND_IN_DIR": str(work_dir / "tinker"),
        # Several of Ray's processes share few cores: one thread each.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work_dir / "datasets"),
        "PYTHONWARNINGS": "ignore",
    }


class PrivateRay:
    """A one-node cluster without GPUs, up between `__enter__` and `__exit__`.

    Attributes:
        environment: the whole environment for processes that use the cluster, RAY_ADDRESS and its token included.
            Ray's own output goes to ray.log in the folder that its CPU_ROLLOUT_WORK names.
    """

    def __init__(self, environment: Mapping[str, str], *, num_cpus: int = 8) -> None:
        self.environment: dict[str, str] = {**os.environ, **environment}
        self.num_cpus = num_cpus  # a number for Ray's arithmetic: every engine and runner reserves one
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PrivateRay:
        logs = Path(self.environment["CPU_ROLLOUT_WORK"])
        options = (f"--num-cpus={self.num_cpus}", "--num-gpus=0", f"--object-store-memory={200 * 2**20}")
        cluster = private_ray(lambda _: None, logs, environment=self.environment, options=options)
        self.environment.update(self._stack.enter_context(cluster).environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
