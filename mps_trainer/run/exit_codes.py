"""Exit codes of the sidecar, by which the supervisor decides what follows.

OK           asked to end, or nobody left to serve: everything is saved    nothing follows
TASK_FAILED  the auxiliary task raised, or its loss is not finite          FAILED; it would fail again
BAD_CONFIG   the run file or the settings cannot work                      FAILED; it would fail again
GPU_FAULT    the CUDA context is dead, such as after a device-side assert  restarted; what was in work is set aside
anything else, or a signal: a crash                                        restarted, with a backoff
"""

OK = 0
CRASHED = 1
TASK_FAILED = 3
BAD_CONFIG = 4
GPU_FAULT = 5

#: What a restart cannot cure.
FINAL = frozenset({OK, TASK_FAILED, BAD_CONFIG})
