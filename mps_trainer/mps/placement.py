"""What the supervisor decided for the sidecar on a shared GPU: `placement.json` in the run's MPS folder.

Maker: the supervisor, before it starts a sidecar. Eater: the sidecar, which proves every word of it before READY.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mps_trainer.errors import PlacementError
from mps_trainer.mps.environment import sidecar_env
from mps_trainer.mps.folder import MpsFolder
from mps_trainer.run.private_files import write_private

_FILE = "placement.json"


@dataclass(frozen=True, kw_only=True)
class GpuPlacement:
    """Where the sidecar trains and with how much.

    Attributes:
        gpu_uuid: the full UUID of the one GPU that it sees.
        pool: bytes for its tensors.
        limit: bytes for all of it, the CUDA context included; MPS enforces it.
        share_percent: of the SMs; 100 leaves them unrestricted.
        blocking_launches: every kernel is waited for, so that never more than one is in flight.
        priority: of the MPS client; 1 is the lower one. Only a benchmark has another.
    """

    gpu_uuid: str
    pool: int
    limit: int
    share_percent: int = 100
    blocking_launches: bool = True
    priority: int = 1

    def save(self, folder: MpsFolder) -> None:
        """Write it by rename."""
        write_private(folder.path / _FILE, json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, folder: MpsFolder) -> GpuPlacement:
        """Read it; PlacementError when there is none."""
        try:
            return cls(**json.loads((folder.path / _FILE).read_text()))
        except (FileNotFoundError, json.JSONDecodeError, TypeError) as error:
            raise PlacementError(
                f"no placement in {folder.path}: {error}",
                "the supervisor writes it; start the run with `mps-trainer up`",
            ) from None

    def environment(self, inherited: Mapping[str, str], folder: MpsFolder) -> dict[str, str]:
        """The environment of the sidecar."""
        kept = {name: value for name, value in inherited.items() if not name.startswith("CUDA_MPS_")}
        env = {**kept, **self._variables(folder)}
        if self.blocking_launches:
            env["CUDA_LAUNCH_BLOCKING"] = "1"
        return env

    def _variables(self, folder: MpsFolder) -> dict[str, str]:
        return sidecar_env(folder.pipe_dir, self.gpu_uuid, self.limit, self.share_percent, self.priority)
