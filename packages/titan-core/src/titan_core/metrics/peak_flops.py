"""The most floating-point operations a second that a device can do: what MFU is a share of."""

from __future__ import annotations

import re
import time

import torch

# Dense bf16 peaks from the makers' data sheets, by a part of the device's name; the first that fits counts.
_KNOWN_GPUS = (
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("H20", 148e12),
    ("H800", 989e12),
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI355X", 2.5e15),
    ("MI325X", 1307.4e12),
    ("MI300X", 1307.4e12),
    ("MI250X", 191.5e12),
)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of one device: dense bf16 for known GPUs, measured in ``dtype``, the type that the job
    computes in, for any other device and for CPUs."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        words = set(re.split(r"[\s-]+", name))
        for part, peak in _KNOWN_GPUS:
            if words.issuperset(part.split()):
                return peak
    return measured_flops(device, dtype)


def measured_flops(device: torch.device, dtype: torch.dtype, size: int = 1024, repeats: int = 8) -> float:
    """The best of a few matrix products under the present ``float32_matmul_precision``, on the threads that this
    process has. Takes some 0.1 s on two CPU cores."""
    # Not random: a draw on this rank alone would part its generator from those of ranks that see the same tokens.
    left = torch.linspace(-1.0, 1.0, size * size, device=device, dtype=dtype).view(size, size)
    right = left.T.contiguous()
    result = left @ right  # the first one sets up
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        torch.mm(left, right, out=result)
        result[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
