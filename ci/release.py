"""Cuts a release of one package: its version, the bounds of the packages that need it, its part of CHANGELOG.md, the table
of versions in the docs, its sdist and wheel in ``dist/``, a commit and a tag. Nothing leaves the machine: the workflow
``release.yml`` publishes tags::

    uv run python -m ci.release titan-float8 0.3.0
    git push --follow-tags
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from ci.isolated import build
from ci.workspace import ROOT, Package, distributions

CHANGELOG = ROOT / "CHANGELOG.md"
UNRELEASED = "## Unreleased"


def release(package: Package, version: Version) -> str:
    """Release ``package``; return the name of the tag.

    Raises:
        SystemExit: the version is lower or released already, the changelog has no entries, or the working tree has changes.
    """
    current = Version(package.project["version"])
    tag = f"{package.name}-v{version}"
    if version < current:
        raise SystemExit(f"{package.name} has version {current}: choose no lower one than {version}")
    if _git("status", "--porcelain"):
        raise SystemExit("the working tree has changes: commit or stash them")
    if _git("tag", "--list", tag):
        raise SystemExit(f"the tag {tag} exists")
    try:
        entries = _write(package, current, version)
        _git("commit", "--quiet", "--all", "--message", f"Release {package.name} {version}", "--message", entries)
    except BaseException:
        _git("reset", "--quiet", "--hard")  # the tree had no changes before
        raise
    _git("tag", "--annotate", tag, "--message", f"{package.name} {version}")
    return tag


def _write(package: Package, current: Version, version: Version) -> str:
    """Write everything that the release changes, the sdist and the wheel; return the entries of the changelog."""
    entries = _release_notes(package.name, version)
    _replace(package.folder / "pyproject.toml", f'version = "{current}"', f'version = "{version}"')
    _replace(
        ROOT / "uv.lock",
        f'name = "{package.name}"\nversion = "{current}"',
        f'name = "{package.name}"\nversion = "{version}"',
    )
    for other in distributions().values():
        requirement = other.requires(package.name)
        if requirement is not None and version not in Requirement(requirement).specifier:
            _require(other, requirement, re.sub(r"[<>=].*", _compatible(version), requirement))
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(["uv", "lock", "--check", "--quiet"], cwd=ROOT, check=True)
            subprocess.run([sys.executable, "-m", "ci.support"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            built = build([package], Path(folder))[package.name]
        except subprocess.CalledProcessError as error:  # uv has said why
            raise SystemExit(f"`{' '.join(map(str, error.cmd))}` failed; nothing is released") from None
        (ROOT / "dist").mkdir(exist_ok=True)
        for file in built:
            shutil.move(file, ROOT / "dist" / file.name)
    return entries


def _release_notes(name: str, version: Version) -> str:
    """Move the entries of package ``name`` below the heading of a release, and return them."""
    text = CHANGELOG.read_text(encoding="utf-8")
    before, heading, after = text.partition(UNRELEASED)
    found = re.search(rf"\n### {re.escape(name)}\n\n(?P<entries>(?:[-* ].*\n)+)", after)
    if not heading or found is None:
        raise SystemExit(f"CHANGELOG.md has no entries under '### {name}' in '{UNRELEASED}': there is nothing to release")
    entries = found["entries"].strip("\n")
    unreleased, *rest = re.split(r"(?m)^(?=## )", after[: found.start()] + after[found.end() :])
    today = datetime.datetime.now(tz=datetime.UTC).date()
    released = f"## {name} {version} ({today})\n\n{entries}\n\n"
    text = before + heading + unreleased.rstrip("\n") + "\n\n" + released + "".join(rest)
    CHANGELOG.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    return entries


def _require(package: Package, old: str, new: str) -> None:
    """Change a requirement of ``package``, which then needs a release too."""
    _replace(package.folder / "pyproject.toml", f'"{old}"', f'"{new}"')
    text, entry = CHANGELOG.read_text(encoding="utf-8"), f"- Requires `{new}`.\n"
    heading = f"\n### {package.name}\n\n"
    before, unreleased, after = text.partition(f"{UNRELEASED}\n")
    own, *rest = re.split(r"(?m)^(?=## )", after)
    own = own.replace(heading, heading + entry, 1) if heading in own else f"{own.rstrip()}\n{heading}{entry}\n"
    CHANGELOG.write_text(before + unreleased + own + "".join(rest), encoding="utf-8")
    print(f"{package.name} now requires {new}: release it too")


def _compatible(version: Version) -> str:
    """Return the versions that keep what ``version`` has: those of its major, before 1.0 of its minor."""
    end = f"{version.major + 1}" if version.major else f"0.{version.minor + 1}"
    return f">={version},<{end}"


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise SystemExit(f"{file.relative_to(ROOT)} contains {old!r} {text.count(old)} times")
    file.write_text(text.replace(old, new), encoding="utf-8")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=distributions(), metavar="PACKAGE")
    parser.add_argument("version", metavar="VERSION", help="the new version, such as 0.3.0")
    arguments = parser.parse_args()
    try:
        version = Version(arguments.version)
    except InvalidVersion:
        parser.error(f"{arguments.version!r} is not a version, such as 0.3.0")
    tag = release(distributions()[arguments.package], version)
    print(f"{tag}: its files are in dist/; `git push --follow-tags` publishes the commit and the tag")


if __name__ == "__main__":
    main()
