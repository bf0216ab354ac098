"""Rehearses a release without an upload::

    uv run python -m ci.rehearse                                    # everything: some minutes
    uv run python -m ci.rehearse --extra train --out dist           # titan-llm[train]; keeps the files and an index of them
    uv run python -m ci.rehearse --tag titan-float8-v0.3.0 --out dist   # keeps the files of this release alone: release.yml

Builds the sdist of each distribution, and from it the wheel, which must have what a wheel from the repository has; checks
both with twine; installs ``titan-llm`` from an index of these files into a fresh environment; and trains a step there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from ci.isolated import build, build_wheels, constraints, environment, uv
from ci.workspace import META, Package, distributions, with_dependencies

_STEP = ("train", "--training.steps", "1", "--model.args.n_layers", "1", "--training.seq_len", "32")
_INSTALLED = """
import json
from importlib.metadata import distributions
print(json.dumps({one.name: one.version for one in distributions() if one.name.startswith("titan")}))
"""


def rehearse(extra: str, out: Path, python: str) -> dict[str, tuple[Path, Path]]:
    """Rehearse the release of ``titan-llm[extra]`` and of all that it requires; leave the files and an index in ``out``, and
    return the sdist and the wheel by name.

    Raises:
        SystemExit: a file is not as it must be.
        subprocess.CalledProcessError: a command failed, and has said why.
    """
    chosen, wanted = required(extra), f"{META}[{extra}]" if extra else META
    files = build(chosen, out)
    print(f"built {len(files)} sdists, and a wheel from each", flush=True)
    with tempfile.TemporaryDirectory(prefix="titan-rehearse-") as temporary:
        folder = Path(temporary)
        for name, wheel in build_wheels(chosen, folder / "direct").items():
            if names := differing(files[name][1], wheel):
                raise SystemExit(f"the sdist of {name} gives another wheel than the repository: {', '.join(names)} differ")
        print("wheels from the repository are the same", flush=True)
        both = [str(one) for pair in files.values() for one in pair]
        _run(folder, sys.executable, "-m", "twine", "--no-color", "check", "--strict", *both)
        print("twine check passed", flush=True)
        interpreter = folder / "venv/bin/python"
        uv("venv", "--python", python, str(folder / "venv"))
        uv(
            "pip", "install", "--python", str(interpreter), "--index", write_index(files, out).as_uri(),
            "--constraints", str(constraints([], "locked", interpreter, folder / "constraints.txt")),
            wanted,
        )  # fmt: skip
        found = json.loads(_run(folder, str(interpreter), "-c", _INSTALLED))
        if found != (built := {one.name: one.project["version"] for one in chosen}):
            raise SystemExit(f"{wanted} has installed {found}, and not {built}")
        print(f"installed {wanted} from the index", flush=True)
        _run(folder, str(interpreter.with_name("titan")), *_STEP)
        print("trained a step", flush=True)
    return files


def required(extra: str) -> list[Package]:
    """Return ``titan-llm`` and the packages that ``titan-llm[extra]`` requires, directly and indirectly."""
    meta = distributions()[META]
    waiting = [
        Requirement(one) for one in [*meta.project["dependencies"], *meta.project["optional-dependencies"].get(extra, ())]
    ]
    if META in (one.name for one in waiting):  # titan-llm[all]
        waiting = [Requirement(one) for one in meta.requirements]
    found = {one.name: one for each in waiting if each.name != META for one in with_dependencies(each.name)}
    return [meta, *found.values()]


def differing(one: Path, other: Path) -> list[str]:
    """Return the names of the files that two wheels do not have alike."""
    contents = []
    for wheel in (one, other):
        with zipfile.ZipFile(wheel) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist()})
    return sorted(name for name in {**contents[0], **contents[1]} if contents[0].get(name) != contents[1].get(name))


def write_index(files: dict[str, tuple[Path, Path]], out: Path) -> Path:
    """Write a package index (PEP 503) of ``files``, which are in ``out``; return its folder."""
    for name, pair in files.items():
        page = out / "simple" / name / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        links = (
            f'<a href="../../{file.name}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}">{file.name}</a>'
            for file in pair
        )
        page.write_text(f"<!DOCTYPE html><html><body>{'<br>'.join(links)}</body></html>\n", encoding="utf-8")
    return out / "simple"


def tagged(tag: str) -> Package:
    """Return the distribution of which ``tag`` is a release.

    Raises:
        SystemExit: the tag is of no distribution, or of another version; or the workflow runs in another repository than the
            metadata say.
    """
    releases = {f"{name}-v{one.project['version']}": one for name, one in distributions().items()}
    if tag not in releases:
        raise SystemExit(f"{tag} is no release of this commit, which can have {', '.join(releases)}")
    package = releases[tag]
    stated = package.project["urls"]["Repository"]
    here = f"{os.environ.get('GITHUB_SERVER_URL', '')}/{os.environ.get('GITHUB_REPOSITORY', '')}"
    if here not in ("/", stated):
        raise SystemExit(
            f"the metadata of {package.name} say {stated}, and this is {here}: CONTRIBUTING.md says how to set the address"
        )
    return package


def _run(folder: Path, *command: str) -> str:
    """Run ``command`` in ``folder`` without settings of Titan; return its output."""
    variables = {name: value for name, value in environment().items() if not name.startswith("TITAN_")}
    return subprocess.run(command, cwd=folder, env=variables, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    extras = ("", *distributions()[META].extras)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--extra", choices=extras, default="all", help=f"what to install of {META} (default: all)")
    what.add_argument("--tag", help="keep the files of this release alone")
    parser.add_argument("--out", type=Path, help="folder for the files, which must not exist")
    parser.add_argument(
        "--python", default=sys.executable, help="Python of the fresh environment (default: the current one)"
    )
    options = parser.parse_args()
    release = tagged(options.tag) if options.tag else None
    if options.out is not None and options.out.exists():
        parser.error(f"{options.out} exists")
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "dist"
        try:
            files = rehearse(options.extra, out, options.python)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"`{' '.join(map(str, error.cmd))}` failed\n{error.stdout or ''}") from None
        if options.out is not None and release is None:
            shutil.copytree(out, options.out)
        elif options.out is not None and release is not None:
            options.out.mkdir(parents=True)
            for file in files[release.name]:
                shutil.copy(file, options.out)


if __name__ == "__main__":
    main()
