"""A misspelt path is refused with the nearest one."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_core.cli.main import main
from titan_core.toolkit.errors import nearest_path


def test_the_nearest_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs" / "llama3_debug").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert nearest_path("outputs/llama3_debgu") == "did you mean 'outputs/llama3_debug'?"
    assert nearest_path(f"{tmp_path}/output") == f"did you mean '{tmp_path}/outputs'?"
    for far in ("other", "outputs/x", "none/llama3_debug", "\0", "x" * 5000, ""):
        assert nearest_path(far) == "check the path"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["train", "mine.tml"], "mine.tml: is neither a recipe nor a file; did you mean 'mine.toml'?"),
        (["train", "mime.toml"], "mime.toml: does not exist; did you mean 'mine.toml'?"),
        (["train", "other.toml"], "other.toml: does not exist; check the path"),
    ],
)
def test_commands_suggest_the_nearest_path(
    arguments: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").touch()
    (tmp_path / "outputs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert error in capsys.readouterr().err
