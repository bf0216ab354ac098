"""Python, torch and the compilers that ``torch.compile`` calls. Reads torch's version without importing torch."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import importlib_metadata

from titan_core.api import CheckResult, HealthContext
from titan_core.toolkit.jobs import Health

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch."""

    version: str
    cuda: str | None
    """CUDA version that it was built for (``"13.2"``)."""
    hip: str | None
    folder: Path


def torch_build() -> TorchBuild | None:
    """Return the installed torch, or ``None``. Runs only torch's generated ``version.py``."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    values = run_path(str(folder / "version.py"))
    return TorchBuild(str(values["__version__"]), values.get("cuda"), values.get("hip"), folder)


def check(context: HealthContext) -> Iterator[CheckResult]:
    """Check Python, torch, its libraries and the compilers."""
    yield CheckResult("Python", Health.OK, f"{platform.python_version()} on {platform.platform()}")
    build = torch_build()
    if build is None:
        yield CheckResult("torch", Health.ERROR, "is not installed: nothing can train", "install torch 2.11 or newer")
        return
    target = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "the CPU only"
    yield CheckResult("torch", Health.OK, f"{build.version}, built for {target}")
    if build.hip:
        yield CheckResult("ROCm", Health.NOTE, "Titan is developed on CUDA and CPU; nothing here is tested on ROCm")
    if build.cuda:
        yield _nccl(build.cuda)
    yield from compilers(os.environ, triton=bool(build.cuda))


def _nccl(cuda: str) -> CheckResult:
    wheel = f"nvidia-nccl-cu{cuda.partition('.')[0]}"
    try:
        return CheckResult("NCCL", Health.OK, f"{importlib_metadata.version(wheel)} ({wheel})")
    except importlib_metadata.PackageNotFoundError:
        return CheckResult("NCCL", Health.NOTE, "is not a package of its own here: torch contains it, or uses the system's")


def compilers(environment: Mapping[str, str], triton: bool) -> Iterator[CheckResult]:
    """Check the prerequisites of ``torch.compile``: a C++ compiler for CPU code; Triton, a C compiler and Python's headers
    for GPU code; a folder for compiled code.

    Args:
        triton: whether torch is built for GPUs.
    """
    requested = environment.get("CXX")
    cxx = shutil.which(requested) if requested else shutil.which("g++") or shutil.which("clang++")
    if cxx:
        yield CheckResult("C++ compiler", Health.OK, cxx)
    else:
        missing = f"CXX = {requested} is not a program" if requested else "neither g++ nor clang++ is on the PATH"
        yield CheckResult(
            "C++ compiler", Health.WARNING, f"{missing}: compile.enable = true fails on the CPU", "install g++ (or set CXX)"
        )
    if triton:
        try:
            yield CheckResult("Triton", Health.OK, importlib_metadata.version("triton"))
        except importlib_metadata.PackageNotFoundError:
            why = "is not installed: compile.enable = true fails on GPUs"
            yield CheckResult("Triton", Health.WARNING, why, "install the triton that torch requires")
        requested = environment.get("CC")
        if not (
            shutil.which(requested) if requested else shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
        ):
            why = "Triton compiles its launchers with one: compile.enable = true fails on GPUs"
            yield CheckResult("C compiler", Health.WARNING, why, "install gcc (or set CC)")
        header = Path(sysconfig.get_path("include")) / "Python.h"
        if not header.is_file():
            why = f"{header} is missing, and Triton compiles against it: compile.enable = true fails on GPUs"
            yield CheckResult("Python headers", Health.WARNING, why, "install python3-dev, or use uv's Python")
    cache = Path(environment.get(_CACHE) or tempfile.gettempdir())
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        why = f"{cache} cannot be written: compile.enable = true fails"
        yield CheckResult("compiled code", Health.WARNING, why, f"set {_CACHE} to a writable folder")
