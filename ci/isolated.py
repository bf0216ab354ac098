"""Runs a package's tests in a fresh environment with its declared dependencies and the requirements of the tests."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from ci.workspace import CORE, ROOT, Package, packages, with_dependencies

_VENV_VARIABLES = ("PYTHONPATH", "VIRTUAL_ENV", "UV_RUN_RECURSION_DEPTH")


def run_suite(package: Package, torch: Literal["locked", "lowest"], python: str, arguments: Sequence[str]) -> int:
    """Build the wheels of ``package`` and of its dependencies in the workspace, install them, and run the package's tests.

    Args:
        torch: whether to install the locked versions or the lowest supported torch.
        python: interpreter or version of the environment.
        arguments: further arguments of pytest.

    Returns:
        The exit status of pytest.

    Raises:
        subprocess.CalledProcessError: a wheel cannot be built, or the requirements cannot be installed.
    """
    with tempfile.TemporaryDirectory(prefix=f"{package.name}-") as temporary:
        folder = Path(temporary)
        interpreter = folder / "venv/bin/python"
        _uv("venv", "--python", python, str(folder / "venv"))
        _uv(
            "pip", "install", "--python", str(interpreter), "--constraints", str(_constraints(folder, torch)),
            *_groups(package), *_requirements(package, folder / "wheels"),
        )  # fmt: skip
        _uv("pip", "list", "--python", str(interpreter), quiet=False)
        command = [str(interpreter), "-m", "pytest", str(package.suite.relative_to(ROOT)), *arguments]
        return subprocess.run(command, cwd=ROOT, env=_environment(), check=False).returncode


def build_wheels(chosen: Sequence[Package], folder: Path) -> dict[str, Path]:
    """Build the wheel of each package; return the files by package name."""
    wheels = {}
    for package in chosen:
        _uv("build", "--package", package.name, "--wheel", "--out-dir", str(folder))
        (wheels[package.name],) = folder.glob(f"{package.module}-*.whl")
    return wheels


def _requirements(package: Package, folder: Path) -> Iterator[str]:
    """Yield the requirements, by wheel: the package with all its extras, and its dependencies in the workspace."""
    for name, wheel in build_wheels(with_dependencies(package.name), folder).items():
        extras = f"[{','.join(package.extras)}]" if name == package.name and package.extras else ""
        yield f"{name}{extras} @ {wheel.as_uri()}"


def _groups(package: Package) -> Iterator[str]:
    """Yield the uv options for the requirements of the tests: dependency groups in the workspace's ``pyproject.toml``."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    yield from ("--group", "pyproject.toml:test")
    if f"test-{package.name}" in groups:
        yield from ("--group", f"pyproject.toml:test-{package.name}")


def _constraints(folder: Path, torch: Literal["locked", "lowest"]) -> Path:
    """Write a constraints file: all versions in uv.lock, or only the lowest supported torch."""
    file = folder / "constraints.txt"
    if torch == "lowest":
        declared = packages()[CORE].requires("torch")
        floor = re.search(r">=\s*([\d.]+)", declared or "")
        assert floor is not None, f"{CORE} declares no minimum version of torch: {declared}"
        file.write_text(f"torch=={floor.group(1)}.*\n", encoding="utf-8")
        return file
    exported = _uv(
        "export", "--frozen", "--all-packages", "--all-extras", "--all-groups",
        "--no-emit-workspace", "--no-hashes", "--no-annotate", "--no-header",
    )  # fmt: skip
    # Constraints must not have extras: turn `coverage[toml]==7.0` into `coverage==7.0`.
    file.write_text(re.sub(r"(?m)^([\w.-]+)\[[^\]]*\]", r"\1", exported), encoding="utf-8")
    return file


def _uv(*arguments: str, quiet: bool = True) -> str:
    """Run ``uv``; return its output, or print it unless ``quiet``. Errors go to the terminal."""
    command = ["uv", arguments[0], *(["--quiet"] if quiet and arguments[0] != "export" else []), *arguments[1:]]
    if not quiet:
        subprocess.run(command, cwd=ROOT, env=_environment(), check=True)
        return ""
    return subprocess.run(command, cwd=ROOT, env=_environment(), check=True, stdout=subprocess.PIPE, text=True).stdout


def _environment() -> dict[str, str]:
    """Return this process's environment without the variables of its own virtual environment."""
    return {name: value for name, value in os.environ.items() if name not in _VENV_VARIABLES}
