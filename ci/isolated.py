"""Runs a package's tests in a fresh environment with its declared dependencies and the requirements of the tests."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

from ci.bounds import lowest_versions, numbers, unreachable
from ci.workspace import KIT, ROOT, Package, declared, packages, test_groups, with_dependencies

Resolution = Literal["locked", "lowest-direct"]

_VENV_VARIABLES = ("PYTHONPATH", "VIRTUAL_ENV", "UV_RUN_RECURSION_DEPTH")


def run_tests(
    chosen: Sequence[Package], tests: Sequence[str], resolution: Resolution, python: str, arguments: Sequence[str]
) -> int:
    """Build the wheels of ``chosen`` and of their dependencies in the workspace, install them, and run ``tests``.

    Args:
        tests: files, folders or single tests, as pytest accepts them.
        resolution: whether to install the locked versions, or the lowest that the packages and the tests declare.
        python: interpreter or version of the environment.
        arguments: further arguments of pytest.

    Returns:
        The exit status of pytest.

    Raises:
        subprocess.CalledProcessError: a wheel cannot be built, or the requirements cannot be installed.
        SystemExit: a declared lowest version cannot be installed with its package.
    """
    with tempfile.TemporaryDirectory(prefix="titan-ci-") as temporary:
        folder = Path(temporary)
        interpreter = folder / "venv/bin/python"
        uv("venv", "--python", python, str(folder / "venv"))
        uv(
            "pip", "install", "--python", str(interpreter),
            "--constraints", str(constraints(chosen, resolution, interpreter, folder / "constraints.txt")),
            *_groups(chosen), *requirements_of(chosen, folder / "wheels", lowest=resolution == "lowest-direct"),
        )  # fmt: skip
        uv("pip", "list", "--python", str(interpreter), quiet=False)
        command = [str(interpreter), "-m", "pytest", *tests, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode


def build_wheels(chosen: Sequence[Package], folder: Path) -> dict[str, Path]:
    """Build the wheel of each package; return the files by package name."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        build = partial(uv, "build", "--wheel", "--out-dir", str(folder), "--package")
        list(pool.map(build, [package.name for package in chosen]))
    return {package.name: next(folder.glob(f"{package.module}-*.whl")) for package in chosen}


def build(chosen: Sequence[Package], folder: Path) -> dict[str, tuple[Path, Path]]:
    """Build the sdist of each package, and its wheel from the sdist; return the two files by package name."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(uv, "build", "--out-dir", str(folder), "--package"), [package.name for package in chosen]))
    return {
        one.name: (next(folder.glob(f"{one.module}-*.tar.gz")), next(folder.glob(f"{one.module}-*.whl"))) for one in chosen
    }


def requirements_of(chosen: Sequence[Package], folder: Path, lowest: bool = False) -> Iterator[str]:
    """Yield the requirements: the wheels of the chosen packages, with all their extras, of their dependencies in the
    workspace, or with ``lowest`` of the lowest versions of these that the packages declare, and of the kit that their tests
    use. A package that is named by its file is not looked up in an index, where its name may be another project's."""
    names = (*(package.name for package in chosen), KIT)
    needed = {one.name: one for name in names for one in with_dependencies(name)}
    extras = {package.name: f"[{','.join(package.extras)}]" for package in chosen if package.extras}
    floors = lowest_versions(one for package in needed.values() for one in package.requirements) if lowest else {}
    older = {
        name: floors[name]
        for name in needed.keys() - {package.name for package in chosen}
        if name in floors and numbers(floors[name]) < numbers(needed[name].project["version"])
    }
    wheels = build_wheels([package for name, package in needed.items() if name not in older], folder)
    for name, version in older.items():
        wheels[name] = _released_wheel(name, version, folder, chosen[0].name)
    for name, wheel in wheels.items():
        yield f"{name}{extras.get(name, '')} @ {wheel.as_uri()}"


def _released_wheel(name: str, version: str, folder: Path, needed_by: str) -> Path:
    """Build the wheel of package ``name`` at the tag of its release ``version``.

    Raises:
        SystemExit: there is no such tag.
    """
    tags = subprocess.run(["git", "tag", "--list", f"{name}-v*"], cwd=ROOT, check=True, capture_output=True, text=True)
    tag = next((tag for tag in tags.stdout.split() if numbers(tag.removeprefix(f"{name}-v")) == numbers(version)), None)
    if tag is None:
        raise SystemExit(f"no tag {name}-v{version}: {needed_by} cannot be tried with the lowest {name} of its bound")
    with tempfile.TemporaryDirectory() as temporary:
        sources = subprocess.run(["git", "archive", tag, f"packages/{name}"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "--extract", "--directory", temporary], input=sources.stdout, check=True)
        uv("build", "--wheel", "--out-dir", str(folder), f"{temporary}/packages/{name}")
    return next(folder.glob(f"{name.replace('-', '_')}-{tag.removeprefix(f'{name}-v')}-*.whl"))


def _groups(chosen: Sequence[Package]) -> list[str]:
    """Return the uv options for the requirements of the tests: dependency groups in the workspace's ``pyproject.toml``."""
    return [option for group in test_groups(chosen) for option in ("--group", f"pyproject.toml:{group}")]


def constraints(chosen: Sequence[Package], resolution: Resolution, interpreter: Path, file: Path) -> Path:
    """Write a constraints file: all versions in uv.lock, or the lowest that the packages and the tests declare."""
    if resolution == "lowest-direct":
        require_reachable(chosen, interpreter)
        exported = _lowest(chosen, interpreter)
    else:
        exported = uv(
            "export", "--frozen", "--all-packages", "--all-extras", "--all-groups",
            "--no-emit-workspace", "--no-hashes", "--no-annotate", "--no-header",
        )  # fmt: skip
    # Constraints must not have extras: turn `coverage[toml]==7.0` into `coverage==7.0`.
    file.write_text(re.sub(r"(?m)^([\w.-]+)\[[^\]]*\]", r"\1", exported), encoding="utf-8")
    return file


def require_reachable(chosen: Sequence[Package], interpreter: Path) -> None:
    """Refuse a declared lowest version that an installation of its package alone cannot have.

    Beside another package a version may be higher: transformers requires a newer rich than titan-core does, which does not
    make titan-core's bound wrong.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pins = pool.map(lambda package: _lowest([package], interpreter), chosen)
        for package, lowest in zip(chosen, pins, strict=True):
            if wrong := unreachable(declared([package]), lowest):
                listed = ", ".join(f"{name} (the lowest is {version})" for name, version in sorted(wrong.items()))
                raise SystemExit(
                    f"no installation of {package.name} has the lowest versions that it declares: raise {listed}"
                )


def _lowest(chosen: Sequence[Package], interpreter: Path) -> str:
    """Return the pins of an installation that has the lowest versions that ``chosen`` and their tests declare."""
    return uv(
        "pip", "compile", "--python", str(interpreter), "--resolution", "lowest-direct", "--all-extras", *_groups(chosen),
        "--no-annotate", "--no-header", *(f"--no-emit-package={name}" for name in packages()),
        *(str(package.folder / "pyproject.toml") for package in chosen),
    )  # fmt: skip


def uv(*arguments: str, quiet: bool = True) -> str:
    """Run ``uv``; return its output, or print it unless ``quiet``. Errors go to the terminal."""
    command = ["uv", arguments[0], *(["--quiet"] if quiet and arguments[0] != "export" else []), *arguments[1:]]
    if not quiet:
        subprocess.run(command, cwd=ROOT, env=environment(), check=True)
        return ""
    return subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.PIPE, text=True).stdout


def environment() -> dict[str, str]:
    """Return this process's environment without the variables of its own virtual environment."""
    return {name: value for name, value in os.environ.items() if name not in _VENV_VARIABLES}
