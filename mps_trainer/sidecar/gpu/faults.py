"""When the CUDA context is dead: know it, and end at once.

After a device-side assert, an illegal address or the fall of the MPS server every call of CUDA fails, and some never
return. There is nothing to save from the device any more, and nothing in flight: the driver has dropped it. So the
process says what happened and leaves, without a synchronisation, a checkpoint or the destructors of the libraries.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

import torch

from mps_trainer.run.exit_codes import GPU_FAULT

# In the driver's words (cudaGetErrorString); each leaves the context unusable.
_DEAD = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "hardware stack error",
    "operation not supported on global/shared address space",
    "unspecified launch failure",
    "launch timed out",
    "uncorrectable ECC",
    "uncorrectable NVLink",
    "MPS client",
    "MPS server",
    "MPS RPC",
)
# These may be a consequence of one of the above, or a mere wrong argument: only the device can tell.
_UNCLEAR = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "CUSPARSE_STATUS", "CUFFT_")


def is_gpu_fault(error: BaseException, device: torch.device | None = None) -> bool:
    """Whether the CUDA context has died, by the error that told of it, or one that this error came from.

    Args:
        device: asked when the message is unclear; None asks nobody.
    """
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, RuntimeError) and "CUDA" in text.upper() and any(words in text for words in _DEAD):
            return True
        if isinstance(seen, RuntimeError) and any(words in text for words in _UNCLEAR):
            return device is not None and device.type == "cuda" and not _answers(device)
        seen = seen.__cause__ or seen.__context__
    return False


def end_at_once(code: int = GPU_FAULT) -> NoReturn:
    """Leave the process with nothing but its logs flushed."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _answers(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
