"""The most floating-point operations a second that a device can do: what MFU is a share of."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import torch

# Dense peaks in bf16 and in float8 (where there are units for it) from the makers' data sheets, by a part of the device's
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


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of one device for products in ``dtype``. Of known GPUs the makers' figures, in bf16 for types of 16 bits
    and more; of any other device and of CPUs, what is measured in ``dtype``."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        words = set(re.split(r"[\s-]+", name))
        for part, bf16, float8 in _KNOWN_GPUS:
            if words.issuperset(part.split()):
                return float8 if dtype.itemsize == 1 and float8 is not None else bf16
    # There is no product of 8-bit numbers to be measured everywhere; such a device then counts by its 16-bit ones.
    return measured_flops(device, torch.bfloat16 if dtype.itemsize == 1 else dtype)


def ideal_seconds_per_token(
    flops_per_token: float, dtype: torch.dtype, others: Mapping[torch.dtype, float], device: torch.device
) -> float:
    """Seconds that one device would take for a token if each product ran at the peak of the type that it is made in: what
    MFU is measured by.

    Args:
        flops_per_token: of all products, forward and backward.
        dtype: the type that products are made in.
        others: of the products that are made in another one, by type.
    """
    seconds = sum(flops / peak_flops(device, one) for one, flops in others.items())
    return seconds + (flops_per_token - sum(others.values())) / peak_flops(device, dtype)


def measured_flops(device: torch.device, dtype: torch.dtype, repeats: int = 8) -> float:
    """The best of a few matrix products under the present ``float32_matmul_precision``, on the threads that this
    process has. Takes some 0.1 s on two CPU cores."""
    # A GPU is given several large ones at once: what passes between the host and it must not count.
    size, products = (8192, 10) if device.type == "cuda" else (1024, 1)
    # Not random: a draw on this rank alone would part its generator from those of ranks that see the same tokens.
    left = torch.linspace(-1.0, 1.0, size * size, device=device, dtype=dtype).view(size, size)
    right = left.T.contiguous()
    result = left @ right  # the first one sets up
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(products):
            torch.mm(left, right, out=result)
        result[0, 0].item()  # waits for the device
        best = min(best, (time.perf_counter() - started) / products)
    return 2 * size**3 / best
