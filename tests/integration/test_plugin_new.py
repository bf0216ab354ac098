"""Each template of ``titan plugin new`` makes a distribution that is built, installed from its wheel, passes ``titan plugin
check`` and its own tests; and what is wrong in a plugin is named."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.distributions import python_path
from titan_core.cli.main import main
from titan_testing.cli.new import STAGES, values_of

NAME = "titan-made"


def made(stage: str, folder: Path, changes: dict[str, tuple[str, str]] | None = None) -> tuple[Path, dict[str, str]]:
    """Write the distribution of a stage and install its wheel; return its folder, and an environment that has it.

    Args:
        changes: file below the package -> a text in it, and what replaces it.
    """
    place = folder / "made"
    assert main(["plugin", "new", NAME, "--stage", stage, "--output", str(place)]) == 0
    for name, (old, new) in (changes or {}).items():
        file = place / "src/titan_made" / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(folder / "site")]
    subprocess.run([*install, str(place)], check=True)
    return place, {**os.environ, "PYTHONPATH": python_path(folder / "site"), "OMP_NUM_THREADS": "1"}


def run(words: list[str], place: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


def check(place: Path, environment: dict[str, str], keys: str) -> dict[str, Any]:
    """Return what ``titan plugin check --json`` finds."""
    done = run(["titan_core", "plugin", "check", "made", "--json", *shlex.split(keys)], place, environment)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["passed"] else 2), done.stderr
    return found


@pytest.mark.wheels
@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_a_template_passes_its_own_tests(stage: str, tmp_path: Path) -> None:
    place, environment = made(stage, tmp_path)
    found = check(place, environment, values_of(NAME, stage)["check"])
    wrong = [one for one in found["checks"] if not one["passed"]]
    assert not wrong
    tested = run(["pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests"], place, environment)
    assert tested.returncode == 0, tested.stdout[-3000:] + tested.stderr
    assert not run(["compileall", "-q", "src", "tests"], place, environment).returncode


PROGRAMS = {"titan": ["titan_core"], "torchrun": ["torch.distributed.run"]}


@pytest.mark.wheels
@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_the_readme_of_a_template_works_with_the_core_and_a_model(
    stage: str, tmp_path: Path, only_plugins: Callable[..., None]
) -> None:
    place, environment = made(stage, tmp_path)
    only_plugins(*([] if stage in ("model", "command") else ["llama"]))
    for recipe in re.findall(r"(?s)```toml\n(.*?)```", (place / "README.md").read_text()):
        (place / "small.toml").write_text(recipe.replace("steps = 20", "steps = 2"))
    program, *words = shlex.split(values_of(NAME, stage)["use"])
    done = run([*PROGRAMS[program], *words], place, {**os.environ, "PYTHONPATH": environment["PYTHONPATH"]})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


TOO_FEW = ("(2 * args.n_layers + 1)", "2 * args.n_layers")
COLUMN = ('down.weight": Row()', 'down.weight": Column()')
MISTAKES: dict[str, tuple[str, str, tuple[str, str], str, str]] = {
    # stage, file, change, the check that finds it, the error
    "imports torch": ("model", "plugin.py", ("from pydantic", "import torch\nfrom pydantic"), "import", "imports torch"),
    "a misspelt Ref": ("dataset", "plugin.py", ("lines:build", "lines:bild"), "code", "has no attribute 'bild'"),
    "sees a later token": (
        "model", "model.py", ("h = self.embedding(tokens)", "h = self.embedding(tokens).cumsum(1).flip(1)"), "causality",
        "logits depend on later tokens",
    ),
    "a wrong rule": ("model", "plugin.py", COLUMN, "TP 2", "'blocks.1.mlp', which has no layer with the rule Row"),
    "ignores documents": ("model", "model.py", ("q, k, v, documents", "q, k, v, None"), "documents", "each document alone"),
    "counts too few parameters": ("model", "plugin.py", TOO_FEW, "sizes", "but its definition has num_params"),
    "no documentation": (
        "debug", "plugin.py", ('    """Seconds after which a step counts as slow; 0: steps are not counted."""\n', ""),
        "description", "does not document made.limit",
    ),
    "forgets the sum": (
        "parallelism", "sums.py", ("dist.all_reduce(", "(lambda *_, **__: None)("), "a job with made.count",
        "gradients are summed wrongly over ranks",
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_is_named(mistake: str, tmp_path: Path) -> None:
    stage, file, change, name, error = MISTAKES[mistake]
    found = check(*made(stage, tmp_path, {file: change}), values_of(NAME, stage)["check"])
    wrong = {one["check"]: one["detail"] for one in found["checks"] if one["passed"] is False}
    assert name in wrong, wrong
    assert error in wrong[name]


@pytest.mark.full
def test_what_lacks_a_file_is_not_tried_and_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    reader = ["--reader", "titan_testing.checks.formats:read_by_transformers"]
    assert main(["plugin", "check", "llama", "--args", "{dim = 64, n_layers = 2}", "--json", *reader]) == 0
    found = json.loads(capsys.readouterr().out)
    (path,) = [one for one in found["checks"] if one["passed"] is None]
    assert path["component"] == "tokenizer llama3" and path["detail"].endswith("; pass --set model.tokenizer_path=PATH")
    names = {"layout", "causality", "decoding", "TP 2", "EP 2", "exported weights", "another reader", "assembles"}
    assert {one["check"] for one in found["checks"]} >= names


def test_a_name_that_cannot_be_used_is_one_error(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("My Plugin", "titan-2d", "class", "titan-import"):
        assert main(["plugin", "new", name, "--stage", "model"]) == 2
        assert "is no name of a distribution; use lower-case letters" in capsys.readouterr().err
    assert main(["plugin", "new", "titan-llama", "--stage", "model"]) == 2
    assert "a plugin 'llama' is installed; choose another name" in capsys.readouterr().err
    Path("taken").mkdir()
    assert main(["plugin", "new", "taken", "--stage", "model"]) == 2
    assert "taken: exists; choose another --output" in capsys.readouterr().err
    assert main(["plugin", "check", "nonsense"]) == 2
    assert "plugin 'nonsense': is not installed" in capsys.readouterr().err
    assert main(["plugin", "check", "llama", "--set", "count=2"]) == 2
    assert "is no KEY=VALUE; write it like" in capsys.readouterr().err
    assert not list(in_tmp.glob("*/pyproject.toml"))
