"""The memory of this machine; a container's own limit counts as the machine's."""

from __future__ import annotations

from pathlib import Path

import psutil

#: Limit and use of a container: version 2 of cgroups, and version 1.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def read_memory() -> tuple[int, int]:
    """Bytes of memory that there are, and that processes may still take."""
    memory = psutil.virtual_memory()
    limit, used = _cgroup_memory()
    if not limit:
        return memory.total, memory.available
    return min(memory.total, limit), min(memory.available, max(limit - used, 0))


def _cgroup_memory() -> tuple[int, int]:
    for limit_path, used_path in _CGROUPS:
        try:
            limit, used = Path(limit_path).read_text().strip(), Path(used_path).read_text().strip()
        except (FileNotFoundError, PermissionError):
            continue
        # Version 1 writes "no limit" as a number near 2**63.
        if limit.isdigit() and int(limit) < 2**60:
            return int(limit), int(used)
    return 0, 0
