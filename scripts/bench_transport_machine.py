"""What bench_transport.py knows of the machine: processor time, cores, the memcpy reference, medians."""

import contextlib
import mmap
import os
import platform
import resource
import statistics
import time
from pathlib import Path

import numpy as np

#: Messages under way.
DEPTH = 4
#: When to begin nothing more, monotonic seconds: the run's budget.
BUDGET = [float("inf")]
#: Cores of writer and reader, None where the scheduler chooses.
PINS = [None, None]


def spent():
    """Whether the run's budget is spent: rounds under way end, peers and sections that wait are left out."""
    return time.monotonic() >= BUDGET[0]


def checksum(array):
    """Reads every byte: the sum of all 8-byte words, modulo 2**64."""
    return int(np.add.reduce(array[: array.nbytes // 8 * 8].view(np.uint64)))


def cpu_s():
    """Processor seconds of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def choose_cores(wanted):
    """ "A,B" as two core numbers; "auto": two physical cores that share a cache, so that no two threads of one core
    play both ends. Where that cannot be read, the first and the last that this process may use."""
    if wanted != "auto":
        return [int(core) for core in wanted.split(",")]
    allowed = sorted(os.sched_getaffinity(0))
    first = allowed[len(allowed) // 2]  # not the first core, which serves most interrupts
    for core in allowed:
        if core != first and _beside(first, core):
            return [first, core]
    return [first, allowed[-1] if allowed[-1] != first else allowed[0]]


def _beside(one, other):
    cpu = "/sys/devices/system/cpu/cpu{}/{}"
    try:
        siblings = Path(cpu.format(one, "topology/thread_siblings_list")).read_text()
        theirs = Path(cpu.format(other, "topology/thread_siblings_list")).read_text()
        shared = Path(cpu.format(one, "cache/index3/shared_cpu_list")).read_text()
        return siblings != theirs and shared == Path(cpu.format(other, "cache/index3/shared_cpu_list")).read_text()
    except OSError:
        return False


def pin(core):
    """Keep the calling thread on one core; None leaves it where the scheduler puts it.

    Called after a link is open, so that a peer's own threads keep the whole machine.
    """
    if core is not None:
        os.sched_setaffinity(0, {core})


@contextlib.contextmanager
def writer_on_its_core(wanted=True):
    """Keep the writer's thread on its core for a while. Services start daemons here, which would inherit it: not them.

    Their consumer would share the writer's core, and lose by it.
    """
    if PINS[0] is None or not wanted:
        yield
        return
    before = os.sched_getaffinity(0)
    pin(PINS[0])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def spread(values, scale=1.0, digits=2):
    """median (min..max)"""
    scaled = [v * scale for v in values]
    return f"{statistics.median(scaled):.{digits}f} ({min(scaled):.{digits}f}..{max(scaled):.{digits}f})"


def machine():
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return (
        f"{model.partition(':')[2].strip() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, numpy {np.__version__}, load {os.getloadavg()[0]:.1f} at the start"
    )


class Memcpy:
    """The reference: numpy copies of the same bytes into pre-faulted shared memory of this process."""

    def __init__(self, nbytes):
        self.map = mmap.mmap(-1, DEPTH * nbytes)
        self.slots = np.frombuffer(self.map, np.uint8).reshape(DEPTH, nbytes)
        self.slots[:] = 1

    def seconds(self, arrays, n):
        start = time.perf_counter()
        for i in range(n):
            np.copyto(self.slots[i % DEPTH, : arrays[0].nbytes], arrays[i % len(arrays)])
        return time.perf_counter() - start
