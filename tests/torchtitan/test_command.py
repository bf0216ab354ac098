"""``titan config import``: files, output and exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tomli

from titan_core.cli.main import main

RECIPE = """
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./none/tokenizer"

[debug]
seed = 4

[training]
gc_freq = 50
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    file = tmp_path / "old.toml"
    file.write_text(RECIPE)
    return file


def test_the_recipe_is_on_stdout_and_the_table_on_stderr(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "import", str(old)]) == 0
    out, err = capsys.readouterr()
    recipe = tomli.loads(out)
    assert recipe["training"]["seed"] == 4
    assert recipe["training"]["gc_freq"] == 50
    assert "debug.seed = 4" in err and "training.seed = 4" in err
    assert "model.tokenizer_path = ./none/tokenizer: not there" in err


def test_a_file_is_not_overwritten(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = old.with_name("new.toml")
    command = ["config", "import", str(old), "--output", str(new)]
    assert main(command) == 0
    first = new.read_text()
    assert capsys.readouterr().out == ""
    new.write_text("kept")
    assert main(command) == 2
    assert "exists already; add --force" in capsys.readouterr().err
    assert new.read_text() == "kept"
    assert main([*command, "--force"]) == 0
    assert new.read_text() == first


def test_json(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "import", str(old), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["complete"] is True
    assert tomli.loads(answer["recipe"])["model"]["flavor"] == "8B"
    entry = next(entry for entry in answer["keys"] if entry["old"] == "debug.seed")
    assert (entry["status"], entry["new"]) == ("changed", {"training.seed": 4})


def test_whatever_the_file_holds_comments_stay_comments(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "x" * 500
    lines = [f'"a\\nb = 1" = "{text}\\n[training]"', "day = 2024-05-01", "[[mine]]", "deep = [{a = 1}]"]
    old.write_text(RECIPE + "\n".join(lines))
    assert main(["config", "import", str(old)]) == 1
    out, err = capsys.readouterr()
    assert "a" not in tomli.loads(out)["training"] and "mine" not in tomli.loads(out)
    assert text in out and "training.day = 2024-05-01" in out and '[{"deep" = [{"a" = 1}]}]' in out
    assert all(line.startswith("unknown ") for line in err.splitlines() if "2024-05-01" in line or "xxx" in line)


def test_unknown_and_unsupported_keys_set_the_exit_status(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old.write_text(RECIPE + 'varlen = true\ndtype = "bfloat16"\nhub_token = "hf_abcdefghijklmnop"\n')
    assert main(["config", "import", str(old)]) == 1
    out, err = capsys.readouterr()
    tomli.loads(out)
    for text in (out, err):
        assert "training.varlen = true" in text and 'training.dtype = "bfloat16"' in text
        assert "hf_abcdefghijklmnop" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training\nsteps = 1\n", r":1: not valid TOML"),
        ("[training]\nsteps = = 1\n", r":2: not valid TOML"),
        ("[project]\nname = 'a'\n", r"is not a TorchTitan recipe: it has \[project\]"),
        ("", r"is not a TorchTitan recipe: it has no section"),
        ('[model]\ntokenizer = "byte"\n[training]\nsteps = 3\n', r'model.tokenizer = "byte": is a key of Titan'),
        ('[model]\ntokenizer = "byte"\n[training]\nseed = 3\n', r'model.tokenizer = "byte": is a key of Titan'),
        ("torchrun --nproc-per-node 8 train.py \\\n  --training.steps 8 \\\n", r":1: not valid TOML"),
        ('[training]\nsteps = "many"\n', r'training.steps = "many": must be a whole number'),
        ("[training]\nsteps = true\n", r"training.steps = true: must be a whole number"),
        ("[training]\nbatch_size = 8\n", r"before October 2025, .*: training.batch_size \(now training.local_batch_size\)"),
        ("[[training]]\nsteps = 8\n", r"is not a TorchTitan recipe"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_line(
    text: str, message: str, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old.write_text(text)
    assert main(["config", "import", str(old)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_paths_that_cannot_be_read_or_written(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, message in (
        (old.with_name("none.toml"), "No such file"),
        (old.parent, "Is a directory"),
        (old.with_name("config_registry.py"), "is Python"),
    ):
        assert main(["config", "import", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert main(["config", "import", str(old), "--output", str(old.parent / "none" / "new.toml")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["config", "import", str(old), "--output", str(old.parent), "--force"]) == 2
    assert "name a file" in capsys.readouterr().err
