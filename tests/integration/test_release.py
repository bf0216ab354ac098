"""The command that cuts a release of one package, tried in a copy of the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci.workspace import ROOT

pytestmark = [pytest.mark.wheels, pytest.mark.full]

CHANGELOG = """# Changelog

## Unreleased

### titan-core

- A change of the core,
  in two lines.

### titan-float8

- Scales are halved.
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository with the files of this one, and a short changelog."""
    for name in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if name.startswith(
            (
                "packages/",
                "ci/",
                "docs/install.md",
                "pyproject.toml",
                "uv.lock",
                "README.md",
                "LICENSE",
                ".gitignore",
                ".python",
            )
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.name", "A")
    git(tmp_path, "config", "user.email", "a@example.org")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ci.release", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_release_is_a_version_a_wheel_a_commit_and_a_tag(copy: Path) -> None:
    done = release(copy, "titan-float8", "0.1.1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("titan-float8-v0.1.1: ")
    assert {file.name for file in (copy / "dist").glob("titan*")} == {
        "titan_float8-0.1.1-py3-none-any.whl", "titan_float8-0.1.1.tar.gz",
    }  # fmt: skip
    assert git(copy, "tag", "--list", "--points-at", "HEAD") == "titan-float8-v0.1.1"
    assert git(copy, "log", "-1", "--format=%B") == "Release titan-float8 0.1.1\n\n- Scales are halved."
    assert git(copy, "diff", "--name-only", "HEAD~1").split() == [
        "CHANGELOG.md", "docs/install.md", "packages/titan-float8/pyproject.toml", "uv.lock",
    ]  # fmt: skip
    unreleased, released = (copy / "CHANGELOG.md").read_text().split("## titan-float8 0.1.1 (")
    assert "### titan-core\n\n- A change" in unreleased and "titan-float8" not in unreleased
    assert released.endswith(")\n\n- Scales are halved.\n")
    assert "the tag titan-float8-v0.1.1 exists" in release(copy, "titan-float8", "0.1.1").stderr
    assert "has no entries under '### titan-float8'" in release(copy, "titan-float8", "0.1.2").stderr


def test_packages_follow_a_minor_version_of_the_core(copy: Path) -> None:
    done = release(copy, "titan-core", "0.2.0")
    assert done.returncode == 0, done.stderr
    assert "titan-ckpt now requires titan-core>=0.2.0,<0.3: release it too" in done.stdout
    assert '"titan-core>=0.2.0,<0.3",' in (copy / "packages/titan-ckpt/pyproject.toml").read_text()
    assert '"titan-core>=0.2.0,<0.3",' in (copy / "pyproject.toml").read_text()
    assert (
        "| `titan-ckpt` | 0.1.0 | 3.11, 3.12, 3.13 | >=2.11, <2.16 | >=0.2.0, <0.3 | 1.0 |"
        in (copy / "docs/install.md").read_text()
    )
    unreleased, released = (copy / "CHANGELOG.md").read_text().split("## titan-core 0.2.0 (")
    assert "### titan-float8\n\n- Requires `titan-core>=0.2.0,<0.3`.\n- Scales" in unreleased
    assert "### titan-ckpt\n\n- Requires `titan-core>=0.2.0,<0.3`.\n" in unreleased
    assert "in two lines." in released


def test_a_bound_keeps_its_extras(copy: Path) -> None:
    (copy / "CHANGELOG.md").write_text(CHANGELOG.replace("titan-float8", "titan-data"))
    git(copy, "commit", "--quiet", "--all", "--message", "entries")
    done = release(copy, "titan-data", "0.2.0")
    assert done.returncode == 0, done.stderr
    assert '"titan-data[ray,s3]>=0.2.0,<0.3"' in (copy / "pyproject.toml").read_text()
    assert "| `titan-data` | 0.2.0 | 3.11, " in (copy / "docs/install.md").read_text()
    assert "titan-llm now requires titan-data[ray,s3]>=0.2.0,<0.3: release it too" in done.stdout
    done = release(copy, "titan-llm", "0.1.1")
    assert done.returncode == 0, done.stderr
    assert (copy / "dist/titan_llm-0.1.1-py3-none-any.whl").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("titan-float8", "0.0.9"), "titan-float8 has version 0.1.0: choose no lower one than 0.0.9"),
        (("titan-float8", "next"), "'next' is not a version"),
        (("titan-flat8", "0.3.0"), "invalid choice: 'titan-flat8'"),
        (("titan-data", "0.3.0"), "has no entries under '### titan-data'"),
    ],
)
def test_a_release_that_makes_no_sense_is_refused(copy: Path, arguments: tuple[str, str], why: str) -> None:
    done = release(copy, *arguments)
    assert done.returncode and why in done.stderr and "Traceback" not in done.stderr
    assert not git(copy, "status", "--porcelain")


def test_a_release_that_cannot_be_built_leaves_nothing(copy: Path) -> None:
    (copy / "packages/titan-float8/README.md").unlink()  # of which the wheel's metadata are made
    git(copy, "commit", "--quiet", "--all", "--message", "without")
    head = git(copy, "rev-parse", "HEAD")
    done = release(copy, "titan-float8", "0.3.0")
    assert done.returncode == 1 and "failed; nothing is released" in done.stderr and "Traceback" not in done.stderr
    assert (git(copy, "rev-parse", "HEAD"), git(copy, "tag", "--list"), git(copy, "status", "--porcelain")) == (head, "", "")


def test_changes_that_are_not_committed_are_refused(copy: Path) -> None:
    (copy / "README.md").write_text("mine")
    assert "the working tree has changes" in release(copy, "titan-float8", "0.3.0").stderr


def test_the_lowest_core_of_a_bound_is_built_from_its_tag(copy: Path) -> None:
    """``python -m ci PACKAGE --resolution lowest-direct`` tries a package with the oldest core that its bound allows."""
    code = (
        "import sys; from pathlib import Path; from ci.isolated import requirements_of; from ci.workspace import packages\n"
        "print(*requirements_of([packages()['titan-optim']], Path(sys.argv[1]), lowest=True))"
    )

    def wheels() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, str(copy / "wheels")]
        return subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)

    assert release(copy, "titan-core", "0.1.0").returncode == 0
    (copy / "CHANGELOG.md").write_text(CHANGELOG)
    git(copy, "commit", "--quiet", "--all", "--message", "entries")
    assert release(copy, "titan-core", "0.1.1").returncode == 0
    found = wheels()
    assert "titan_core-0.1.0-py3-none-any.whl" in found.stdout and "titan_optim-0.1.0-py3" in found.stdout, found.stderr
    git(copy, "tag", "--delete", "titan-core-v0.1.0")
    assert "no tag titan-core-v0.1: titan-optim cannot be tried with the lowest titan-core of its bound" in wheels().stderr
