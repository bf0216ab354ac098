"""The command line: output and exit status."""

from __future__ import annotations

import json

import pytest
import tomli

from titan_core.cli.main import main


def lines(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_help_lists_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = lines(capsys)
    assert "\n  config " in text and "show, check" in text
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--help"])
    assert exit_.value.code == 0
    assert "--section.key VALUE" in lines(capsys)


def test_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    assert "titan-harness 1.0" in lines(capsys)
    assert main(["plugins", "--json"]) == 0
    listing = json.loads(lines(capsys))
    assert listing["broken"] == []
    (parallel,) = (plugin for plugin in listing["plugins"] if plugin["name"] == "harness_parallel")
    assert {"stage": "transform", "name": "harness_data_parallel"}.items() <= parallel["provides"][0].items()


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert "tiny" in lines(capsys)
    assert main(["recipes", "--json"]) == 0
    assert "tiny" in {recipe["name"] for recipe in json.loads(lines(capsys))}


def test_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "tiny", "--training.steps", "3"]) == 0
    assert tomli.loads(lines(capsys))["training"]["steps"] == 3
    assert main(["config", "check", "tiny", "--world-size", "4"]) == 0
    assert "valid for 4 process(es): dp_shard=4" in lines(capsys)
    assert main(["config", "check", "tiny", "--json"]) == 0
    assert json.loads(lines(capsys))["valid"] is True


def test_job_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "show", "tiny", "--world-size", "2"]) == 0
    text = lines(capsys)
    assert "DATA: harness_data_parallel (titan-harness)" in text
    assert main(["job", "show", "tiny", "--world-size", "2", "--json"]) == 0
    job = json.loads(lines(capsys))
    assert job["mesh"]["dp_shard"] == 2
    assert job["batch"]["microbatches"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "no such command; did you mean 'train'?"),
        (["config"], "needs a subcommand; use one of show, check"),
        (["config", "chek"], "no such command; did you mean 'check'?"),
        (["config", "plugins"], "no such command; did you mean `titan plugins`?"),
        (["train", "--nproc", "2"], "--nproc: no such option; see `titan train --help`"),
        (["plugins", "--training.steps=3"], "`titan plugins` takes no config overrides"),
        (
            ["train", "tiny", "--training.steps", "abc"],
            'command line: training.steps = "abc": must be a whole number, greater than 0 and at most 1000000000',
        ),
        (["train", "tiny", "--job.dump_folder", "/proc/nowhere"], "cannot be written"),
    ],
)
def test_mistakes_exit_with_2_and_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("titan: error: ")
    assert error.count("\n") == 1
    assert message in error
