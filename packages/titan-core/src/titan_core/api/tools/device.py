"""All that depends on the kind of device: CPU and CUDA are equals, and their differences live here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan_core.api.errors import UserError


def choose_device(choice: str) -> torch.device:
    """The device of this rank: ``"cpu"``, ``"cuda"``, or ``"auto"``.

    Raises:
        UserError: CUDA was requested and is not available.
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


class HostCopy:
    """Tensors on their way to the host: the copy starts now, and is waited for when it is needed. Work that the device gets
    afterwards may then still be under way."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # Into pinned memory, where it is a GPU's; of a CPU's tensor there is nothing to copy.
        self._tensors = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
        self._done = torch.cuda.Event() if any(tensor.is_cuda for tensor in tensors) else None
        if self._done is not None:
            self._done.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors, on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors


@dataclass(frozen=True)
class Memory:
    """What this process uses of its device's memory, in GiB. On a CPU, what is resident of the process."""

    active_gib: float
    """Now; on a GPU by tensors that are in use."""
    reserved_gib: float | None
    """What torch has taken from the GPU, to hand it out itself."""
    peak_gib: float
    """The most that was active so far."""
    retries: int | None
    """How often torch gave back what it had reserved and tried again, since a GPU's memory had run out. It is slow: more
    than a few mean that the job barely fits."""


def memory(device: torch.device) -> Memory:
    """What this process uses of ``device``."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return Memory(
            stats["active_bytes.all.current"] / 2**30,
            stats["reserved_bytes.all.current"] / 2**30,
            stats["active_bytes.all.peak"] / 2**30,
            stats["num_alloc_retries"],
        )
    import resource
    import sys

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = most / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB on Linux
    now = _resident_gib(otherwise=peak)
    return Memory(now, None, max(now, peak), None)


def _resident_gib(otherwise: float) -> float:
    """What of the process is in memory now, where the system says."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    except FileNotFoundError:
        return otherwise
