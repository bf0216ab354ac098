"""The most floating-point operations a second that a device can do: what MFU is a share of.

Data sheets give it for known GPUs. Elsewhere it is measured, and so an estimate: a CPU that is busy with something else
meanwhile seems slower than it is, and MFU then too high, even above 100 %.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Dense peaks in bf16 and in 8 bits (where there are units for it) from the makers' data sheets, by a part of the device's
# name; the first that fits counts.
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


@dataclass(frozen=True)
class IdealTime:
    """How long a token would take at peak speed."""

    seconds: float
    estimated: bool
    """Whether some peak was measured, and is not a data sheet's."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a known GPU for products in ``dtype``: the maker's figure, in bf16 for types of 16 bits and more.
    ``None`` for any other device."""
    if device.type == "cuda":
        words = set(re.split(r"[\s-]+", torch.cuda.get_device_name(device)))
        for part, bf16, in_8_bits in _KNOWN_GPUS:
            if words.issuperset(part.split()):
                return in_8_bits if dtype.itemsize == 1 and in_8_bits is not None else bf16
    return None


def ideal_time_per_token(
    flops_per_token: float, dtype: torch.dtype, others: Mapping[torch.dtype, float], device: torch.device
) -> IdealTime:
    """What one device would take for a token if each product ran at the peak of the type that it is made in: what MFU is
    measured by.

    Args:
        flops_per_token: of all products, forward and backward.
        dtype: the type that products are made in.
        others: of the products that are made in another one, by type.
    """
    flops = {dtype: flops_per_token - sum(others.values())}
    for other, count in others.items():
        flops[other] = flops.get(other, 0.0) + count
    seconds, estimated = 0.0, False
    for one, count in flops.items():
        peak = peak_flops(device, one)
        estimated |= peak is None
        seconds += count / (peak if peak is not None else measured_flops(device, one))
    return IdealTime(seconds, estimated)


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The best of many short matrix products under the present ``float32_matmul_precision``, on the threads that this
    process has. Takes some 0.1 s on an idle CPU."""
    if dtype.itemsize == 1:
        dtype = torch.bfloat16  # 8-bit products cannot be measured everywhere; those devices count by their 16-bit ones
    if device.type == "cuda":
        # Several large ones at once: what passes between the host and the device must not count.
        size, products, repeats, seconds = 8192, 10, 8, 0.0
    else:
        # One takes 1 to 3 ms on a core: so short that the system rarely interrupts it, and the fastest of many is as fast as
        # on an idle machine even where others compete for it.
        size, products, repeats, seconds = 512, 1, 20, 0.1
    # Not random: a draw on this rank alone would part its generator from those of ranks that see the same tokens.
    left = torch.linspace(-1.0, 1.0, size * size, device=device, dtype=dtype).view(size, size)
    right = left.T.contiguous()
    result = left @ right  # the first one sets up
    result[0, 0].item()
    best, done, end = math.inf, 0, time.perf_counter() + seconds
    while done < repeats or time.perf_counter() < end:
        started = time.perf_counter()
        for _ in range(products):
            torch.mm(left, right, out=result)
        result[0, 0].item()  # waits for the device
        best = min(best, (time.perf_counter() - started) / products)
        done += 1
    return 2 * size**3 / best
