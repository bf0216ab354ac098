"""A misspelt path of a stored model is refused with the nearest one."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_core.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["generate", "outputs/min"],
            "outputs/min: does not exist, and no installed plugin knows a model of this name; did you mean 'outputs/mine'?",
        ),
        (["generate", "./outputs/min"], "outputs/min: does not exist; did you mean 'outputs/mine'?"),
        (["generate", "owner/model"], "or run `titan model download owner/model`"),
        (["generate", "mine.toml"], "mine.toml: is a file; give a run's directory"),
        (["generate", "outputs/mine"], "outputs/mine: there are no checkpoints here"),
        (
            ["generate", "tiny"],
            "tiny: is a recipe, not a trained model; train it first (`titan train tiny`), and give the run",
        ),
        (["checkpoint", "show", "mine.toml"], "mine.toml: there are no checkpoints here"),
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
