"""Builds and loads the stub libraries that let a CUDA build of torch run on a machine without a GPU. Free of torch.

torch's host code asks the CUDA runtime for devices, streams and events even where tensors are fake. ``runtime.c`` and
``driver.c`` answer. They are loaded before torch, for the whole process, so torch's libraries bind to them.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from titan_core.api import Problem, UserError

SOURCES = Path(__file__).parent / "stubs"
COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True)
class Device:
    """The GPU that a simulation pretends to run on."""

    name: str = "NVIDIA H100 80GB HBM3"
    per_machine: int = 8
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    memory: int = 80 * 2**30
    """Bytes."""


DEVICES = {
    device.name: device
    for device in (
        Device(),
        Device("NVIDIA A100-SXM4-80GB", capability=(8, 0), multiprocessors=108),
        Device("NVIDIA B200", capability=(10, 0), multiprocessors=148, memory=180 * 2**30),
    )
}
"""Some devices, by name."""


class CannotSimulate(UserError):
    """This machine or installation cannot simulate a GPU."""


def load(device: Device | None = None) -> None:
    """Make this process simulate CUDA devices. Call it before anything imports torch; further calls do nothing.

    Raises:
        CannotSimulate: torch is loaded already, or the stub libraries cannot be built.
    """
    global _libraries
    if _libraries is not None:
        return
    if "torch" in sys.modules:
        raise _cannot("torch is already imported in this process", "simulate in a process of its own")
    driver, runtime = build()
    # The driver's soname is libcuda.so.1, so whatever opens that finds this one.
    _libraries = ctypes.CDLL(str(driver), ctypes.RTLD_GLOBAL), ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    describe(device or Device())
    configure_allocator()


def configure_allocator() -> None:
    """Make torch request device memory from the runtime. Expandable segments, which Titan sets otherwise, would request it
    from the driver, whose stub has none."""
    os.environ.update(dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:False"))


def describe(device: Device) -> None:
    """Simulate devices of another kind from now on. Call it before torch has initialised CUDA."""
    runtime().titan_describe_device(
        device.name.encode(),
        device.per_machine,
        10 * device.capability[0] + device.capability[1],
        device.multiprocessors,
        ctypes.c_size_t(device.memory),
    )


_libraries: tuple[ctypes.CDLL, ctypes.CDLL] | None = None


def runtime() -> ctypes.CDLL:
    """Return the loaded stand-in for the CUDA runtime.

    Raises:
        CannotSimulate: :func:`load` was not called.
    """
    if _libraries is None:
        raise _cannot(
            "the stub libraries are not loaded", "call titan_simulate.engine.stub_libraries.load() before importing torch"
        )
    return _libraries[1]


def reason() -> str | None:
    """Return why this machine cannot simulate a GPU; ``None`` if it can. Builds the libraries if they do not exist."""
    try:
        build()
    except CannotSimulate as error:
        return error.problems[0].why
    return None


@cache
def build() -> tuple[Path, Path]:
    """Return the stub libraries, for the driver and the runtime, from the cache folder; build them there if necessary.

    Raises:
        CannotSimulate: there is no compiler, torch is no CUDA build, or the headers are missing.
    """
    if sys.platform != "linux":
        raise _cannot(f"needs Linux, and this is {platform.system()}", "use a Linux machine or container")
    headers = _headers()
    folder = _cache_folder() / _key(headers)
    libraries = folder / "libcuda.so.1", folder / "libtitan_cudart.so"
    if all(library.exists() for library in libraries):
        _require_own(folder, *libraries)
        return libraries
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise _cannot(f"needs a C compiler, and none of {', '.join(COMPILERS)} is on PATH", "install gcc or clang")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _require_own(folder)
    for source, library, options in (
        ("driver.c", libraries[0], ["-Wl,-soname,libcuda.so.1"]),
        ("runtime.c", libraries[1], []),
    ):
        # Several processes may build at once: each writes a file of its own and renames it.
        handle, part = tempfile.mkstemp(suffix=".part", dir=folder)
        os.close(handle)
        command = [
            compiler, "-shared", "-fPIC", "-O1", f"-I{SOURCES}", f"-I{headers}", *options,
            "-o", part, str(SOURCES / source), "-ldl",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            with suppress(OSError):
                os.unlink(part)
            raise _cannot(
                f"{compiler} cannot build {source}: {_first_error(done.stderr)}", "report this with your torch version"
            )
        os.chmod(part, 0o755)
        os.replace(part, library)
    return libraries


def _require_own(*paths: Path) -> None:
    """Require that nobody else can have written ``paths``: this process runs the code in them.

    Raises:
        CannotSimulate: another user owns one of them, or may write it.
    """
    for path in paths:
        status = path.stat()
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            fix = f"remove {paths[0]}, or set XDG_CACHE_HOME to a folder that only you can write"
            raise _cannot(f"uses {path}, which another user may have written, and it contains code", fix)


def _headers() -> Path:
    """Return the folder of CUDA's headers among the wheels that torch depends on."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise _cannot("torch is not installed", "install a CUDA build of torch")
    if not (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists():
        raise _cannot("this torch was built without CUDA", "install torch from PyPI on Linux, which is a CUDA build")
    for folder in _header_folders():
        if (folder / "driver_types.h").exists():
            return folder
    raise _cannot("the CUDA headers of torch's own wheels (nvidia-cuda-runtime) are not installed", "reinstall torch")


def _header_folders() -> Iterator[Path]:
    nvidia = importlib.util.find_spec("nvidia")
    for root in nvidia.submodule_search_locations or () if nvidia is not None else ():
        yield from sorted(Path(root).glob("*/include"))


def _key(headers: Path) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.rglob("*.[ch]")):
        digest.update(source.read_bytes())
    digest.update(f"{importlib.metadata.version('torch')} {platform.machine()} {headers}".encode())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "titan" / "simulate"


def _first_error(text: str) -> str:
    return next((line for line in text.splitlines() if "error" in line), text.strip()[-200:])


def _cannot(why: str, fix: str) -> CannotSimulate:
    return CannotSimulate(Problem("simulating a GPU", why, fix))
