"""Peak FLOP/s of a device, the reference for MFU.

For known GPUs the peak comes from data sheets. For other devices it is measured and hence an estimate: a CPU that is busy
with other work appears slower than it is, so that MFU is too high and may exceed 100 %.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

# Dense peaks in bf16 and in 8 bits (None without 8-bit units) from the vendors' data sheets. The first entry whose words all
# occur in the device's name applies.
_KNOWN_GPUS = (
    ("H100 NVL", 835e12, 1671e12),
    ("H100 PCIe", 756e12, 1513e12),
    ("H100", 989e12, 1979e12),
    ("H200", 989e12, 1979e12),
    ("GH200", 989e12, 1979e12),
    ("H20", 148e12, 296e12),
    ("H800", 989e12, 1979e12),
    ("GB300", 2.5e15, 5e15),
    ("B300", 2.25e15, 4.5e15),
    ("GB200", 2.5e15, 5e15),
    ("B200", 2.25e15, 4.5e15),
    ("A100", 312e12, None),
    ("A800", 312e12, None),
    ("A40", 149.7e12, None),
    ("A30", 165e12, None),
    ("A10", 125e12, None),
    ("L40S", 362e12, 733e12),
    ("L40", 181e12, 362e12),
    ("L4", 121e12, 242.5e12),
    ("RTX 4090", 165.2e12, 330.3e12),
    ("RTX 3090", 71e12, None),
    ("MI355X", 2.5e15, 5e15),
    ("MI325X", 1307.4e12, 2614.9e12),
    ("MI300X", 1307.4e12, 2614.9e12),
    ("MI250X", 191.5e12, None),
)

# The same in 4 bits, of the GPUs that have units for them.
_IN_4_BITS = {"GB300": 15e15, "B300": 13.5e15, "GB200": 10e15, "B200": 9e15}


@dataclass(frozen=True)
class IdealTime:
    """Time per token at peak speed."""

    seconds: float
    estimated: bool
    """Whether any of the peaks was measured rather than taken from a data sheet."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the published peak FLOP/s of a known GPU for matmuls in ``dtype``; types of 16 bits and more use the bf16
    figure. Return ``None`` for any other device."""
    if device.type == "cuda":
        words = set(re.split(r"[\s-]+", torch.cuda.get_device_name(device)))
        for part, bf16, in_8_bits in _KNOWN_GPUS:
            if words.issuperset(part.split()):
                if dtype is torch.float4_e2m1fn_x2 and part in _IN_4_BITS:
                    return _IN_4_BITS[part]
                return in_8_bits if dtype.itemsize == 1 and in_8_bits is not None else bf16
    return None


def ideal_time_per_token(
    flops_per_token: float, dtype: torch.dtype, others: Mapping[torch.dtype, float], device: torch.device
) -> IdealTime:
    """Return the time that one device would take for a token if each matmul ran at the peak of its type. MFU is relative to
    this time.

    Args:
        flops_per_token: FLOPs of all matmuls, forward and backward.
        dtype: the type of most matmuls.
        others: FLOPs of the matmuls in other types, by type.
        device: the device.
    """
    flops = {dtype: flops_per_token - sum(others.values())}
    for other, count in others.items():
        flops[other] = flops.get(other, 0.0) + count
    seconds, estimated = 0.0, False
    for matmul_dtype, count in flops.items():
        peak = peak_flops(device, matmul_dtype)
        estimated |= peak is None
        seconds += count / (peak if peak is not None else measured_flops(device, matmul_dtype))
    return IdealTime(seconds, estimated)


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of many short matmuls under the current ``float32_matmul_precision`` and number of
    threads. Takes about 0.1 s on an idle CPU, once in a process."""
    if dtype.itemsize == 1:
        dtype = torch.bfloat16  # not every device can multiply in 8 bits, so use its 16-bit speed
    return _measured(device, dtype, torch.get_float32_matmul_precision(), torch.get_num_threads())


@cache
def _measured(device: torch.device, dtype: torch.dtype, _precision: str, _threads: int) -> float:
    if device.type == "cuda":
        # Several large matmuls per repeat, so that launch and synchronisation overhead is negligible.
        size, matmuls, repeats, seconds = 8192, 10, 8, 0.0
    else:
        # A matmul takes 1 to 3 ms on a core. The system rarely interrupts anything so short, so even on a busy machine the
        # fastest of many runs at full speed.
        size, matmuls, repeats, seconds = 512, 1, 20, 0.1
    # Not random: drawing on this rank alone would desynchronise its generator from those of ranks with the same tokens.
    left = torch.linspace(-1.0, 1.0, size * size, device=device, dtype=dtype).view(size, size)
    right = left.T.contiguous()
    result = left @ right  # warmup
    result[0, 0].item()
    best, done, end = math.inf, 0, time.perf_counter() + seconds
    while done < repeats or time.perf_counter() < end:
        started = time.perf_counter()
        for _ in range(matmuls):
            torch.mm(left, right, out=result)
        result[0, 0].item()  # waits for the device
        best = min(best, (time.perf_counter() - started) / matmuls)
        done += 1
    return 2 * size**3 / best
