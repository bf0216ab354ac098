"""The machine, the software and the source that a result belongs to."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMIT_FILE = ROOT / "wheels/commit"
"""Written by :mod:`benchmarks.gpu.carry`, for a machine whose copy of the source has no repository."""
_PACKAGES = ("torch", "triton", "torchao", "torchtitan", "titan-core", "numpy", "nvidia-nccl-cu13", "nvidia-cudnn-cu13")


class NoGPU(Exception):
    """This machine has no NVIDIA GPU, or its driver does not answer."""


def describe(device: str) -> dict[str, Any]:
    """Return the facts about this machine, without creating a CUDA context in this process.

    Raises:
        NoGPU: ``device`` is ``"cuda"``, and there is none.
    """
    found: dict[str, Any] = {"python": platform.python_version(), "commit": commit(), "device": device}
    found["packages"] = {name: installed for name in _PACKAGES if (installed := _version(name)) is not None}
    found["cpu"] = _cpu()
    return {**found, **(_gpu() if device == "cuda" else {})}


def commit() -> str:
    """Return the commit of the source, with ``+changes`` if files differ from it; "unknown" without a repository."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return COMMIT_FILE.read_text(encoding="utf-8").strip() if COMMIT_FILE.exists() else "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in file.read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _gpu() -> dict[str, Any]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGPU(f"no NVIDIA GPU answers ({error})") from None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return {
            "gpu": pynvml.nvmlDeviceGetName(handle),
            "gpu_memory_gib": round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, 1),
            "gpus": pynvml.nvmlDeviceGetCount(),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
    finally:
        pynvml.nvmlShutdown()
