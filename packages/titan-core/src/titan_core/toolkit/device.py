"""All code that depends on the kind of device. CPU and CUDA are equally supported."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from titan_core.api import UserError
from titan_core.api.observe.deferred_reports import HostCopy as HostCopy

log = logging.getLogger(__name__)


def choose_device(choice: str) -> torch.device:
    """Return the device of this rank for a choice of ``"cpu"``, ``"cuda"`` or ``"auto"``.

    A launcher may show each rank only its own GPU (``CUDA_VISIBLE_DEVICES``); that the GPU is not another rank's is checked
    when the ranks meet.

    Raises:
        UserError: CUDA was requested but is not available, or this machine has more ranks than CUDA devices.
    """
    available = torch.cuda.is_available()
    if choice == "cpu" or (choice == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise UserError.one('job.device = "cuda"', "torch finds no CUDA device", 'set job.device = "auto" or "cpu"')
    count = torch.cuda.device_count()
    index = int(os.environ.get("LOCAL_RANK", "0")) if count > 1 else 0
    if index >= count:
        raise UserError.one(
            f"local rank {index}", f"this machine has only {count} CUDA devices", f"start at most {count} processes on it"
        )
    device = torch.device("cuda", index)
    _avoid_fragmentation()
    torch.cuda.set_device(device)
    return device


_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name


def _avoid_fragmentation() -> None:
    """Let the caching allocator extend its segments, unless the user has configured it. It reads the setting when CUDA is
    first used."""
    if not torch.cuda.is_initialized() and not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        os.environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
        log.info("GPU memory: expandable_segments (%s is not set)", _ALLOCATOR_SETTINGS[0])


@contextmanager
def attention_kernels(device: torch.device) -> Iterator[None]:
    """On a GPU, set the order in which ``scaled_dot_product_attention`` tries its kernels: from the fastest, which need
    certain shapes and types, to the one that computes everything. torch's own order changes between versions."""
    if device.type != "cuda":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    names = attention_order(torch.cuda.get_device_capability(device))
    log.info("attention kernels, in order of preference: %s", ", ".join(names))
    backends = {one.name.removesuffix("_ATTENTION").lower(): one for one in SDPBackend.__members__.values()}
    with sdpa_kernel([backends[name] for name in names], set_priority=True):
        yield


def attention_order(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the attention kernels of a GPU of this compute capability, in order of preference."""
    newest = ("cudnn", "flash") if capability >= (9, 0) else ("flash", "cudnn")  # torch's flash knows nothing new in Hopper
    return (*newest, "efficient", "math")


def backend_for(device: torch.device) -> str:
    """Return the process group backends. CUDA jobs also use gloo, for host values that must not wait for the device."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def device_name(device: torch.device) -> str:
    """Return the device's name for display."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'' if threads == 1 else 's'}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has completed all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Memory:
    """This process's use of device memory in GiB. On a CPU, the resident memory of the process."""

    active_gib: float
    """Current use; on a GPU, by live tensors."""
    reserved_gib: float | None
    """Memory that torch's caching allocator holds on the GPU."""
    peak_gib: float
    """Maximum active memory so far."""
    retries: int | None
    """Number of times that the allocator ran out of GPU memory, freed its cache and tried again. Retries are slow; more than
    a few mean that the job barely fits."""


def memory(device: torch.device) -> Memory:
    """Return this process's use of the memory of ``device``."""
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
    """Return the resident memory of the process, or ``otherwise`` if the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    except FileNotFoundError:
        return otherwise
