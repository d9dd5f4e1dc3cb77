"""The real supervisor, under which several runs, one after the other, use one MPS daemon; for `gpu_drill_vllm.py`.

A run that ends asks its daemon to end too, and the next run has a daemon of its own. An engine that lives on would then
have no sidecar beside it on its own server, where an end can harm it. So here the first run makes the daemon, and as
long as the file `keep` lies in the MPS folder, a run that ends leaves it and the next one adopts it. All else is the
supervisor's own code.
"""

from __future__ import annotations

import sys
from typing import Any

from mps_trainer.launcher import supervisor
from mps_trainer.launcher.gpu_share import GpuShare
from mps_trainer.mps.lease import take_gpu

KEEP = "keep"


class AdoptingShare(GpuShare):
    def start(self) -> None:
        if self.daemon.find() is None:
            super().start()
            return
        # The placement of the first run is kept: the engine's memory was planned with it.
        gpu = self._gpu_at(self._look(), int(self._device.removeprefix("cuda:")))
        self._lease = take_gpu(gpu.uuid, self._run_id)
        self._gpu = gpu

    def close(self, *args: Any, **words: Any) -> bool:
        if (self._folder.path / KEEP).exists():
            self.daemon.quit = lambda *_args, **_words: True  # type: ignore[method-assign]
        return super().close(*args, **words)


if __name__ == "__main__":
    assert supervisor.GpuShare is GpuShare  # what is replaced is what `main` uses
    supervisor.GpuShare = AdoptingShare  # type: ignore[misc]
    sys.exit(supervisor.main())
