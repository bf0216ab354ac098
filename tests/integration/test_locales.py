"""Names beyond ASCII in a locale whose encoding is ASCII (``LC_ALL=C`` and ``PYTHONUTF8=0``): commands work with those that
the system gives them, and a name that the locale lacks is one clear error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
[model]
name = "llama3"
flavor = "debug"
args = {dim = 16, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 16}
[job]
description = "größe"
device = "cpu"
[training]
steps = 2
seq_len = 16
local_batch_size = 1
"""


def titan(folder: Path, *arguments: str) -> tuple[int, str]:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "titan_core", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    output = (done.stdout + done.stderr).decode("ascii")
    assert "Traceback" not in output
    return done.returncode, output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "dépôt"
    folder.mkdir()
    (folder / "ré.toml").write_text(RECIPE, encoding="utf-8")
    return folder


def test_a_recipe_of_such_a_name_is_shown(folder: Path) -> None:
    status, shown = titan(folder, "config", "show", "ré.toml", "--job.dump_folder", "run")
    assert status == 0 and "description" in shown
    status, shown = titan(folder, "config", "show", "ré.toml")  # the run's directory has the name of the recipe
    assert status == 2 and "the locale is not: set LC_ALL=C.UTF-8" in shown


@pytest.mark.full
def test_a_run_of_such_a_recipe_is_reported(folder: Path) -> None:
    assert titan(folder, "train", "ré.toml", "--job.dump_folder", "run")[0] == 0
    assert titan(folder, "report", "run", "--output", "ü.html")[0] == 0
    assert (folder / "ü.html").exists()
    assert "ré.toml" in (folder / "run/events.jsonl").read_text(encoding="utf-8")


@pytest.mark.full
def test_a_run_directory_that_the_locale_cannot_name(folder: Path) -> None:
    recipe = RECIPE.replace("[job]", '[job]\ndump_folder = "rün"')
    (folder / "my.toml").write_text(recipe, encoding="utf-8")
    status, printed = titan(folder, "train", "my.toml")
    assert status == 2
    assert "cannot be a file's name in this locale, whose encoding is ascii; set LC_ALL=C.UTF-8" in printed
    assert "plugin" not in printed
