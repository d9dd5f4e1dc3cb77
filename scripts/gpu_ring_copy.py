#!/usr/bin/env python3
"""How fast does a batch get from the feed ring to the GPU?

    python scripts/gpu_ring_copy.py [--out docs/results/gpu_ring_copy.json]

The ring is a real channel, the sidecar a client of MPS. Every copy is compared with what was sent.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_jobs import WarmParent
from gpu_lab import gpu_uuids, machine

from mps_trainer.mps.control import MpsDaemon
from mps_trainer.mps.environment import sidecar_env, without_mps
from mps_trainer.mps.folder import MpsFolder

# One batch of 256 experiences as the transport's benchmark has it, and one that shows the limit.
SIZES = {"8.4 MB": (256, 8192), "256 MiB": (256, 262144)}


def measure(rows: int, width: int, repeats: int) -> dict[str, Any]:
    import numpy as np
    import torch

    from mps_trainer.columns import IDENTITY_COLUMNS, Column
    from mps_trainer.sidecar.gpu.ring_memory import RingMemory
    from mps_trainer.transport import OperatorChannel, RingSettings, SidecarHub

    device = torch.device("cuda:0")
    columns = (*IDENTITY_COLUMNS, Column(name="feature", source="info.feature", shape=(width,)))
    run_id = secrets.token_hex(4)
    feature = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    batch = {"eid": [str(i) for i in range(rows)], "group": ["g"] * rows, "reward": np.zeros(rows, np.float32)}
    slot = 4 * rows * (width + 1024) + 2**20
    ring = RingMemory(device)
    found: dict[str, Any] = {}
    with (
        OperatorChannel.create(run_id, columns, RingSettings(num_slots=2, slot_bytes=slot)) as channel,
        SidecarHub(run_id, columns) as hub,
    ):
        for name in ("as it is", "registered"):
            if name == "registered":
                segment = hub.segments()[0]
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                found["registration accepted"] = ring.register(segment.address, segment.nbytes)
            channel.send({**batch, "feature": feature}, request_id=1, want_scores=False)
            hub.wait(5.0)
            delivery = hub.receive()
            assert delivery is not None
            values = delivery.batch["feature"].values
            rates = []
            for _ in range(repeats):
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                start.record()
                tensor = ring.to_device(values)
                stop.record()
                ring.wait()
                stop.synchronize()
                rates.append(values.nbytes / start.elapsed_time(stop) / 1e6)
            right = bool(np.array_equal(tensor.cpu().numpy(), feature))
            found[name] = {
                "GB/s, median": statistics.median(rates), "lowest": min(rates), "highest": max(rates), "right": right,
            }  # fmt: skip
            del values, tensor
            delivery.release()
        ring.close()
        hub.close(unlink=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    uuid = gpu_uuids()[0]
    with tempfile.TemporaryDirectory(prefix="mt-") as name, WarmParent(Path(name) / "log") as parent:
        daemon = MpsDaemon(MpsFolder(Path(name) / "m"))
        daemon.start()
        envs = {
            "MPS client": sidecar_env(daemon.folder.pipe_dir, uuid, 8 * 2**30),
            "no MPS": {**without_mps({}), "CUDA_VISIBLE_DEVICES": uuid},
        }
        for who, env in envs.items():
            for size, (rows, width) in SIZES.items():
                job = parent.start("gpu_ring_copy:measure", rows, width, args.repeats, env=env)
                results[f"{who}, {size}"] = job.result(120)
                print(who, size, results[f"{who}, {size}"], flush=True)
        daemon.quit(force_after_s=5)
    right = all(r["registered"]["right"] and r["registration accepted"] for r in results.values()) and (
        results["MPS client, 256 MiB"]["registered"]["GB/s, median"] >= 45
    )
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), "results": results, "as wanted": right}, indent=1))
    print("as wanted:", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
