"""Stands in for NVML where there is no driver: values recorded on a machine with H200s, driver 580.

FAKE_NVML_GPUS says how many; the second one is the first with another UUID. FAKE_NVML_PROCESSES names a JSON
file with the PIDs on them: {"GPU-...": [1, 2]}.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

NVML_DEVICE_MIG_ENABLE = 1
UUIDS = ("GPU-0f3cc1cf-565d-9b0a-543c-d4b754f70410", "GPU-11111111-565d-9b0a-543c-d4b754f70410")


class NVMLError(Exception):
    pass


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlSystemGetDriverVersion():
    return "580.159.04"


def nvmlDeviceGetCount():
    return int(os.environ["FAKE_NVML_GPUS"])


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(total=150754820096, used=644939776, free=150109880320)


def nvmlDeviceGetUUID(handle):
    return UUIDS[handle]


def nvmlDeviceGetName(handle):
    return "NVIDIA H200"


def nvmlDeviceGetComputeMode(handle):
    return 0


def nvmlDeviceGetMigMode(handle):
    return [0, 0]


def nvmlDeviceGetHandleByUUID(uuid):
    return UUIDS.index(uuid)


def nvmlDeviceGetComputeRunningProcesses(handle):
    path = Path(os.environ.get("FAKE_NVML_PROCESSES", "/none"))
    pids = json.loads(path.read_text()).get(UUIDS[handle], []) if path.exists() else []
    return [SimpleNamespace(pid=pid, usedGpuMemory=2**30) for pid in pids]


def nvmlDeviceGetMPSComputeRunningProcesses(handle):
    return []


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=97, memory=40)
