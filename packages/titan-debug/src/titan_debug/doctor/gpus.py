"""NVIDIA GPUs and their driver, by NVML: without torch, and without creating a CUDA context."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from titan_core.api import CheckResult, Health, HealthContext
from titan_debug.doctor.software import torch_build

GIB = 2**30
_PCI = Path("/sys/bus/pci/devices")
_BUSY = GIB
"""Memory in use by other processes from which a note is worth its line."""


def check(context: HealthContext) -> Iterator[CheckResult]:
    """Check the driver, whether torch's build suits it, and the state of each GPU."""
    import pynvml

    build = torch_build()
    yield from gpus(pynvml, build.cuda if build else None, os.environ, present=_present())


def _present() -> bool:
    """Whether the machine has an NVIDIA display or compute adapter, with or without a driver."""
    for device in _PCI.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def gpus(nvml: Any, torch_cuda: str | None, environment: Mapping[str, str], present: bool) -> Iterator[CheckResult]:
    """Check the driver and all GPUs.

    Args:
        nvml: the module ``pynvml``.
        torch_cuda: CUDA version that torch is built for (``"13.2"``), if any.
        present: whether the PCI bus has an NVIDIA GPU.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if present:
            why = f"the machine has an NVIDIA GPU, but its driver does not answer ({error}): jobs run on the CPU"
            fix = "install or load the driver; in a container, start it with --gpus all"
            yield CheckResult("NVIDIA driver", Health.ERROR, why, fix)
        else:
            yield CheckResult("GPU", Health.NOTE, "no NVIDIA GPU: jobs run on the CPU, with gloo")
        return
    try:
        yield _driver(nvml, torch_cuda)
        yield from _visible(nvml, environment)
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        for index, handle in enumerate(handles):
            yield from _gpu(nvml, index, handle)
        yield from _peers(nvml, handles)
    finally:
        nvml.nvmlShutdown()


def _driver(nvml: Any, torch_cuda: str | None) -> CheckResult:
    newest = nvml.nvmlSystemGetCudaDriverVersion_v2()
    major, minor = newest // 1000, newest % 1000 // 10
    shown = f"{nvml.nvmlSystemGetDriverVersion()}, supports CUDA {major}.{minor}"
    if torch_cuda is None:
        why = f"{shown}, but torch is built for the CPU only: jobs do not use the GPU"
        return CheckResult("NVIDIA driver", Health.WARNING, why, f"install a torch that is built for CUDA {major}")
    if int(torch_cuda.partition(".")[0]) > major:
        why = f"{shown}, but torch is built for CUDA {torch_cuda}: torch finds no GPU"
        fix = f"update the driver, or install a torch that is built for CUDA {major}"
        return CheckResult("NVIDIA driver", Health.ERROR, why, fix)
    return CheckResult("NVIDIA driver", Health.OK, shown)


def _visible(nvml: Any, environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check ``CUDA_VISIBLE_DEVICES``: CUDA silently ignores everything from the first invalid entry on."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return
    count = nvml.nvmlDeviceGetCount()
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    invalid = [entry for entry in entries if entry.lstrip("-").isdigit() and not 0 <= int(entry) < count]
    if not entries or invalid[:1] == entries[:1]:
        why = f"is {value!r}: torch finds none of the {count} GPUs"
        yield CheckResult("CUDA_VISIBLE_DEVICES", Health.WARNING, why, "unset it to use all")
    elif invalid:
        why = f"is {value!r}, but there is no GPU {invalid[0]}: CUDA ignores it and all entries after it"
        yield CheckResult("CUDA_VISIBLE_DEVICES", Health.ERROR, why, f"use numbers from 0 to {count - 1}")
    else:
        yield CheckResult("CUDA_VISIBLE_DEVICES", Health.NOTE, f"selects {len(entries)} of {count} GPUs")


def _gpu(nvml: Any, index: int, handle: Any) -> Iterator[CheckResult]:
    subject = f"GPU {index}"
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    capability = ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    name = f"{nvml.nvmlDeviceGetName(handle)}, {memory.total / GIB:.1f} GiB, compute capability {capability}"
    yield CheckResult(subject, Health.OK, name)
    if memory.used > _BUSY:
        why = f"{memory.used / GIB:.1f} GiB of its memory are in use: a job that needs all of it fails"
        yield CheckResult(subject, Health.NOTE, why, "see `nvidia-smi` for the processes that use it")
    mode = _supported(nvml, lambda: nvml.nvmlDeviceGetComputeMode(handle))
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        why = "its compute mode is 'prohibited': torch cannot use it"
        yield CheckResult(subject, Health.ERROR, why, f"run `nvidia-smi -i {index} -c DEFAULT` as administrator")
    mig = _supported(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    if mig and mig[0]:
        yield CheckResult(
            subject, Health.NOTE, "is divided by MIG: NCCL cannot connect its instances, so use one rank per GPU"
        )
    lost = _supported(
        nvml,
        lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
    )
    if lost:
        why = f"{lost} uncorrectable memory errors since the driver was loaded: results may be wrong, and jobs crash"
        yield CheckResult(subject, Health.ERROR, why, "do not train on it; drain the machine and reset or replace the GPU")
    reasons = _supported(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    slow = nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
    if reasons & (slow | nvml.nvmlClocksThrottleReasonSwThermalSlowdown):
        why = "its clock is reduced because it is hot or lacks power: every rank of a job waits for it"
        yield CheckResult(subject, Health.WARNING, why, "check cooling and power supply (`nvidia-smi -q -d PERFORMANCE`)")


def _peers(nvml: Any, handles: list[Any]) -> Iterator[CheckResult]:
    """Check whether all pairs of GPUs are connected by NVLink."""

    def linked(first: int, second: int) -> bool:
        status = partial(nvml.nvmlDeviceGetP2PStatus, handles[first], handles[second], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return _supported(nvml, status) in (None, nvml.NVML_P2P_STATUS_OK)

    apart = [pair for pair in combinations(range(len(handles)), 2) if not linked(*pair)]
    if apart:
        first, second = apart[0]
        why = f"GPUs {first} and {second} are not connected by NVLink: tensor parallelism between them is slow"
        more = f" ({len(apart)} pairs)" if len(apart) > 1 else ""
        yield CheckResult("NVLink", Health.NOTE, f"{why}{more}")


def _supported(nvml: Any, query: Callable[[], Any]) -> Any:
    """Return the result of ``query``, or ``None`` if the GPU does not report it."""
    try:
        return query()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_FunctionNotFound):
        return None
