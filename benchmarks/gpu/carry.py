"""Collects what a machine without a network needs to run this benchmark: the wheels of Titan's packages, and of those
dependencies that the machine lacks. torch and everything that it brings must be there already.

    python3 -m pip list --format=freeze > installed.txt              # on the machine
    uv run python -m benchmarks.gpu.carry --installed installed.txt  # here: fills wheels/
    benchmarks/gpu/on_machine.sh --out results                       # on the machine, in a copy of this folder
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from operator import itemgetter
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.machine import COMMIT_FILE, ROOT, commit
from ci.workspace import packages

PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34, 35)))
"""Platforms of wheels that a Linux of the last years accepts; pip compares them literally."""


def read_installed(file: Path) -> dict[str, str | None]:
    """Return the packages of a machine with their versions: lines ``name==version``, or only ``name`` if the version is
    unknown; other lines of ``pip list --format=freeze`` name local files and keep their name."""
    found: dict[str, str | None] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, installed = line.partition("==")
        name = name.partition(" @ ")[0].strip()
        if name and not name.startswith(("#", "-")):
            found[canonicalize_name(name)] = installed.strip() or None
    return found


def missing(roots: Iterable[str], installed: Mapping[str, str | None], python: str) -> dict[str, str]:
    """Return the packages to carry with their versions: those in this environment.

    Args:
        roots: requirements of the benchmark.
        installed: packages of the machine; one of unknown version is taken to suffice.
        python: version of the machine's Python, such as ``"3.12"``.

    Raises:
        SystemExit: the machine has no suitable torch, or a package is not in this environment.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": "x86_64"}
    found: dict[str, str] = {}
    waiting = [Requirement(text) for text in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        there = installed.get(name, "") if name in installed else ""
        satisfied = name in installed and (there is None or requirement.specifier.contains(there, prereleases=True))
        if name == "torch" and not satisfied:
            raise SystemExit(f"the machine needs {requirement}, and has {there or 'none'}: torch is not carried")
        if satisfied or name in found:
            continue
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            raise SystemExit(f"the machine lacks {requirement}, and so does this environment") from None
        extras = [{**environment, "extra": extra} for extra in ("", *requirement.extras)]
        needed = [Requirement(text) for text in requires(name) or ()]
        waiting += [one for one in needed if one.marker is None or any(one.marker.evaluate(each) for each in extras)]
    return found


def requirements() -> list[str]:
    """Return the requirements of Titan's packages, without their extras, and of the tests."""
    own = packages()
    groups: dict[str, list[Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    declared = [text for package in own.values() for text in package.project["dependencies"]]
    return [text for text in (*declared, *groups["test"]) if Requirement(text).name not in own]


def download(chosen: Mapping[str, str], python: str, out: Path) -> None:
    """Download the wheels of ``chosen`` for the machine's Python."""
    if not chosen:
        return
    command = ["uvx", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation=cp",
               f"--python-version={python}", f"--dest={out}", *(f"--platform={name}" for name in PLATFORMS),
               *(f"{name}=={number}" for name, number in chosen.items())]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)


def main() -> None:
    """Fill the folder of wheels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installed", type=Path, required=True, help="the machine's packages: pip list --format=freeze")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python (default: 3.12)")
    parser.add_argument("--most-mib", type=float, default=60, help="fail if all wheels are larger together (default: 60)")
    parser.add_argument("--dry-run", action="store_true", help="print what the machine lacks, and build nothing")
    options = parser.parse_args()
    chosen = missing(requirements(), read_installed(options.installed), options.python)
    print("to carry:", ", ".join(f"{name} {number}" for name, number in sorted(chosen.items())) or "only Titan's packages")
    if options.dry_run:
        return
    out = COMMIT_FILE.parent
    shutil.rmtree(out, ignore_errors=True)  # pip refuses two versions of a package
    subprocess.run(["uv", "build", "--quiet", "--wheel", "--all-packages", "--out-dir", str(out)], check=True, cwd=ROOT)
    download(chosen, options.python, out)
    COMMIT_FILE.write_text(commit() + "\n", encoding="utf-8")
    wheels = list(out.glob("*.whl"))
    sizes = {file.name: file.stat().st_size / 2**20 for file in wheels}
    size = sum(sizes.values())
    print(f"{len(wheels)} wheels, {size:.1f} MiB, in {out.relative_to(ROOT)}/")
    if size > options.most_mib:
        largest = sorted(sizes.items(), key=itemgetter(1), reverse=True)[:5]
        shown = ", ".join(f"{name} {mib:.1f}" for name, mib in largest)
        raise SystemExit(f"more than --most-mib {options.most_mib:g}; the largest: {shown}")


if __name__ == "__main__":
    sys.exit(main())
