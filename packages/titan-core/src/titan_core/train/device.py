"""All that depends on the kind of device: CPU and CUDA are equals, and their differences live here."""

from __future__ import annotations

import os

import torch

from titan_core.errors import UserError


def choose_device(choice: str) -> torch.device:
    """The device of this rank: ``"cpu"``, ``"cuda"``, or ``"auto"``.

    Raises:
        UserError: CUDA was asked for and is not there.
    """
    available = torch.cuda.is_available()
    if choice == "cpu" or (choice == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise UserError.one('job.device = "cuda"', "torch sees no CUDA device", 'set job.device = "auto" or "cpu"')
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if index >= count:
        raise UserError.one(
            f"local rank {index}", f"this machine has {count} CUDA devices", f"start at most {count} processes on it"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def backend_for(device: torch.device) -> str:
    """Process group backends. CUDA jobs have gloo too, for numbers that the host needs without waiting for the device."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def device_name(device: torch.device) -> str:
    """The device's name, for a person."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory used so far, in GiB: allocated by torch on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB on Linux
