"""Python, torch and the compilers that ``torch.compile`` calls, and on request whether they compute as training does. Reads
torch's version without importing torch."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import importlib_metadata

from titan_core.api import CheckResult, Health, HealthContext, UserError
from titan_core.toolkit.processes import python
from titan_core.toolkit.text import shorten

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_ALL_REDUCE = """
import sys, torch, torch.distributed as dist
rank, path, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if backend == "nccl":
    torch.cuda.set_device(rank)
dist.init_process_group(backend, init_method="file://" + path, rank=rank, world_size=2)
number = torch.ones((), device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(number)
assert number.item() == 2, number
dist.destroy_process_group()
"""
_PATIENCE_SECONDS = 120


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


def compute(context: HealthContext) -> Iterator[CheckResult]:
    """Compute on each device, compile, and connect two processes."""
    import torch

    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    for device in devices:
        yield _attempt(f"matmul on {device}", partial(_matmul, device), "reinstall torch, or update the driver")
    for device in devices[:2]:
        fix = "see the compilers above, or set compile.enable = false"
        yield _attempt(f"torch.compile for {device.type}", partial(_compile, device), fix)
    fix = "see the network above; NCCL_DEBUG=INFO prints what NCCL tries"
    yield _attempt("all-reduce with gloo", partial(_all_reduce, "gloo"), fix)
    if len(devices) > 2:
        yield _attempt("all-reduce with NCCL", partial(_all_reduce, "nccl"), fix)


def _attempt(subject: str, compute: Callable[[], None], fix: str) -> CheckResult:
    try:
        compute()
    except Exception as error:  # noqa: BLE001 - any failure is the result of this check
        lines = (str(error).strip() or type(error).__name__).splitlines()
        # Compilers and processes write the cause last.
        return CheckResult(subject, Health.ERROR, f"fails: {shorten(lines[-1])}", fix)
    return CheckResult(subject, Health.OK, "works")


def _matmul(device: object) -> None:
    import torch

    weight = torch.full((64, 64), 0.5, device=device, dtype=torch.bfloat16, requires_grad=True)  # type: ignore[call-overload]
    total = (weight @ weight).float().sum()
    total.backward()
    if not math.isclose(total.item(), 64**3 * 0.25):
        raise UserError.one(str(device), f"64 x 64 x 64 quarters sum to {total.item()}", "do not train on this device")


def _compile(device: object) -> None:
    import torch

    @torch.compile
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * 2

    x = torch.ones(8, device=device)  # type: ignore[call-overload]
    torch.testing.assert_close(double(x), torch.sin(x) * 2)


def _all_reduce(backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                python("-c", _ALL_REDUCE, str(rank), f"{folder}/store", backend),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            for rank in ranks:
                _, errors = rank.communicate(timeout=_PATIENCE_SECONDS)
                if rank.returncode:
                    raise RuntimeError(errors.strip() or f"a process ended with exit status {rank.returncode}")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
