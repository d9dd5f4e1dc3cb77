"""Are matrix products right on this GPU, under this very share of its SMs?

On Hopper, some shares (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE) make half-precision products leave parts of the output
unwritten, and no error is raised. So every product here goes into an output full of NaN and is compared with float32,
in which such products were right under every share. About a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from mps_trainer.errors import PlacementError

# Shares that were right in all of 378 shapes of products on an H200 (docs/results/gpu_numerics.md).
GOOD_SHARES = "90 to 100 (100 is the default), 47 to 51, 23 to 27, or 10 to 13"

# (M, N, K) of the products. Each bad share leaves gaps in some shapes only, so the choice is by measurement: of 378
# shapes the first three together go wrong under every share under which any of the 378 does.
_SHAPES = (
    (1024, 3584, 1024),
    (64, 3584, 256),
    (1024, 1024, 256),
    (16, 4096, 1024),
    (64, 512, 256),
    (256, 256, 256),
    (2048, 2048, 1024),
    (4096, 4096, 1024),
    (8192, 1024, 1024),
    (512, 4096, 4096),
)
_DTYPES = (torch.bfloat16, torch.float16)
# Relative to the norm of the reference; rounding in bf16 gives about 0.003, an unwritten part far more.
_TOLERANCE = 0.02


@dataclass
class NumericsReport:
    """What was computed and what was wrong.

    Attributes:
        cases: how many results were compared.
        wrong: "name: what was found" of each wrong one.
        multiprocessors: SMs that the process sees.
        seconds: what the check took.
    """

    cases: int = 0
    wrong: list[str] = field(default_factory=list)
    multiprocessors: int = 0
    seconds: float = 0.0

    def require_right(self, share_percent: int) -> None:
        """PlacementError naming the good shares when anything was wrong."""
        if self.wrong:
            raise PlacementError(
                f"with {share_percent} % of the SMs ({self.multiprocessors}) {len(self.wrong)} of {self.cases} "
                f"products are wrong on this GPU: {'; '.join(self.wrong[:3])}",
                f"use a share that passes: {GOOD_SHARES}",
            )


def check_numerics(device: torch.device, seed: int = 0) -> NumericsReport:
    """Compare half-precision products and convolutions with float32; needs about 300 MiB."""
    started = time.perf_counter()
    report = NumericsReport(multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.inference_mode():
        for name, result, reference in _cases(device, generator):
            report.cases += 1
            found = _disagreement(result, reference)
            if found:
                report.wrong.append(f"{name}: {found}")
    report.seconds = time.perf_counter() - started
    return report


def _cases(device: torch.device, generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    for m, n, k in _SHAPES:
        a = torch.randn(m, k, device=device, generator=generator)
        b = torch.randn(k, n, device=device, generator=generator)
        for dtype in _DTYPES:
            low_a, low_b = a.to(dtype), b.to(dtype)
            reference = _float32_product(low_a, low_b)
            out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
            torch.matmul(low_a, low_b, out=out)
            yield f"{_short(dtype)} {m}x{n}x{k}", out, reference
            out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
            torch.matmul(low_a, low_b.t().contiguous().t(), out=out)
            yield f"{_short(dtype)} {m}x{n}x{k} transposed", out, reference
    yield from _fp8_cases(device, generator)
    yield from _convolution_cases(device, generator)


def _fp8_cases(device: torch.device, generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    if torch.cuda.get_device_capability(device) < (8, 9):
        return
    one = torch.ones((), device=device)
    for m, n, k in ((1024, 1024, 1024), (4096, 4096, 1024)):
        a = torch.randn(m, k, device=device, generator=generator).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device=device, generator=generator).to(torch.float8_e4m3fn)
        reference = _float32_product(a.float(), b.float().t())
        _leave_nan_behind(m * n, torch.bfloat16, device)
        out = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        yield f"fp8 {m}x{n}x{k}", out, reference


def _convolution_cases(device: torch.device, generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    x = torch.randn(16, 256, 32, 32, device=device, generator=generator)
    for size in (1, 3):
        weight = torch.randn(512, 256, size, size, device=device, generator=generator) / (16 * size)
        for dtype in _DTYPES:
            low_x, low_weight = x.to(dtype), weight.to(dtype)
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                reference = functional.conv2d(low_x.float(), low_weight.float(), padding=size // 2)
            _leave_nan_behind(reference.numel(), dtype, device)
            yield (
                f"{_short(dtype)} conv {size}x{size}",
                functional.conv2d(low_x, low_weight, padding=size // 2),
                reference,
            )


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return torch.matmul(a.float(), b.float())
    finally:
        torch.set_float32_matmul_precision(precision)


def _leave_nan_behind(num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
    # The next tensor of this size gets this block from PyTorch's cache, NaN included where it is not written.
    torch.full((num_elements,), float("nan"), dtype=dtype, device=device)


def _disagreement(result: Tensor, reference: Tensor, tolerance: float = _TOLERANCE) -> str:
    bad = int((~torch.isfinite(result)).sum())
    if bad:
        return f"{100 * bad / result.numel():.1f} % of the output is not finite"
    error = float(torch.linalg.vector_norm(result.float() - reference) / torch.linalg.vector_norm(reference))
    return f"relative error {error:.3g}" if not error <= tolerance else ""


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
