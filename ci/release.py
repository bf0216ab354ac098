"""Cuts a release of one package: its version, the bounds of the packages that need it, its part of CHANGELOG.md, its wheel
in ``dist/``, a commit and a tag. Nothing leaves the machine::

    uv run python -m ci.release titan-float8 0.3.0
    git push --follow-tags
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ci.isolated import build_wheels
from ci.workspace import ROOT, Package, packages

CHANGELOG = ROOT / "CHANGELOG.md"
UNRELEASED = "## Unreleased"


def release(package: Package, version: Version) -> str:
    """Release ``package``; return the name of the tag.

    Raises:
        SystemExit: the version is not new, the changelog has no entries, or the working tree has changes.
    """
    current = Version(package.project["version"])
    tag = f"{package.name}-v{version}"
    if version <= current:
        raise SystemExit(f"{package.name} has version {current}: choose a higher one than {version}")
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
    """Write everything that the release changes, and the wheel; return the entries of the changelog."""
    entries = _release_notes(package.name, version)
    _replace(package.folder / "pyproject.toml", f'version = "{current}"', f'version = "{version}"')
    _replace(
        ROOT / "uv.lock",
        f'name = "{package.name}"\nversion = "{current}"',
        f'name = "{package.name}"\nversion = "{version}"',
    )
    for other in packages().values():
        requirement = other.requires(package.name)
        if requirement is not None and version not in SpecifierSet(requirement.removeprefix(package.name)):
            _require(other, requirement, f"{package.name}{_compatible(version)}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(["uv", "lock", "--check", "--quiet"], cwd=ROOT, check=True)
            (wheel,) = build_wheels([package], Path(folder)).values()
        except subprocess.CalledProcessError as error:  # uv has said why
            raise SystemExit(f"`{' '.join(map(str, error.cmd))}` failed; nothing is released") from None
        (ROOT / "dist").mkdir(exist_ok=True)
        shutil.move(wheel, ROOT / "dist" / wheel.name)
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
    parser.add_argument("package", choices=packages(), metavar="PACKAGE")
    parser.add_argument("version", metavar="VERSION", help="the new version, such as 0.3.0")
    arguments = parser.parse_args()
    try:
        version = Version(arguments.version)
    except InvalidVersion:
        parser.error(f"{arguments.version!r} is not a version, such as 0.3.0")
    tag = release(packages()[arguments.package], version)
    print(f"{tag}: the wheel is in dist/; `git push --follow-tags` publishes the commit and the tag")


if __name__ == "__main__":
    main()
