"""A package ``titan-core`` or a command ``titan`` of another project is named when Titan starts, and by ``titan doctor``."""

from __future__ import annotations

import sys
from pathlib import Path

import importlib_metadata
import pytest

from harness.distributions import entry_points_in
from titan_core.api import Health, HealthContext
from titan_core.cli.main import main
from titan_core.plugins import names
from titan_core.plugins.registry import Components

THEIRS = "#!/x/python\nimport sys\nfrom titan.cli import main\nsys.exit(main())\n"
OURS = "#!/y/python\nimport sys\nfrom titan_core.__main__ import main\nsys.exit(main())\n"
LONG = "#!/bin/sh\n'''exec' /a/very/long/path/to/python \"$0\" \"$@\"\n' '''\n"
"""How installers start Python when its path is too long for the first line."""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with another project's titan-core."""
    folder = tmp_path / "theirs"
    info = folder / "titan_core-0.11.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: titan-core\nVersion: 0.11.1\n")
    (info / "entry_points.txt").write_text("[console_scripts]\ntitan = titan.cli:main\n")
    assert entry_points_in(folder) == []
    return folder


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``titan`` command, still empty, first on the PATH."""
    file = tmp_path / "bin/titan"
    file.parent.mkdir()
    file.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(file.parent))
    return file


def doctor(tmp_path: Path) -> list[tuple[str, Health]]:
    context = HealthContext(Components.from_installed(), tmp_path, "")
    return [(f"{one.subject}: {one.detail}", one.health) for one in names.check_health(context)]


def test_another_package_behind_ours(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(theirs)])
    assert main(["recipes"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"titan: warning: titan-core 0.11.1 ({theirs}): is another project's package")
    first, second = doctor(tmp_path)
    assert first == (f"titan-core 0.11.1: {theirs} is another project's package with the name of Titan's", Health.WARNING)
    assert second[0].startswith(f"titan-core: {importlib_metadata.version('titan-core')} in ")


def test_another_package_before_ours(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(theirs), *sys.path])
    assert main(["recipes"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"titan: error: titan-core 0.11.1 in {theirs}: is another project's package")
    assert "which it hides; uninstall it" in line


@pytest.mark.parametrize("text", [THEIRS, LONG + THEIRS.partition("\n")[2], "\x7fELF"], ids=["script", "long", "binary"])
def test_another_command(text: str, command: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.write_text(text)
    assert main(["recipes"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"titan: warning: the command `titan` ({command}): comes first on the PATH")
    assert f"write `{sys.executable} -m titan_core`" in line
    assert doctor(tmp_path)[0][1] is Health.WARNING


@pytest.mark.parametrize(
    "text",
    [
        OURS,
        LONG + OURS.partition("\n")[2],
        '#!/usr/bin/env bash\nexec pyenv exec titan "$@"\n',
        "#!/bin/sh\nexec uv run titan\n",
    ],
    ids=["ours", "long", "pyenv", "a user's"],
)
def test_our_command(text: str, command: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.write_text(text)
    assert main(["recipes"]) == 0
    assert capsys.readouterr().err == ""
    assert [health for _, health in doctor(tmp_path)] == [Health.OK]


def test_one_process_of_a_job_reports(
    command: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command.write_text(THEIRS)
    monkeypatch.setenv("RANK", "1")
    assert main(["recipes"]) == 0
    assert capsys.readouterr().err == ""
