"""No name or text of a recipe, a file, a run or a checkpoint reaches the terminal as something that it obeys: every command
prints what may come from others by :func:`titan_core.toolkit.text.say`, or by a function that uses it."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from harness.quick import rows
from titan_core.api._shown import is_obeyed
from titan_core.api.config.toml import parse_toml

PACKAGES = Path(__file__).parents[2] / "packages"
OWN_OUTPUT = {
    "titan_core/toolkit/text.py": "say, and JSON, which has only ASCII",
    "titan_core/cli/job.py": "TOML, in which these characters are escaped as TOML does",
    "titan_core/plugins/names.py": "a Problem escapes its text",
    "titan_cluster/rendering.py": "the file that is submitted, whose texts are checked",
    "titan_cluster/scripts/wait_for_rendezvous.py": "a script of its own, in a container",
    "titan_completion/cli.py": "a script for a shell, from plugins alone",
    "titan_debug/flight/stacks.py": "a file",
    "titan_simulate/cli/calibrate.py": "TOML about this machine",
    "titan_simulate/engine/command_fork.py": "what a process of this command has printed",
}
"""Files that call ``print`` with more than constants, and why that is safe."""

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202etxet\r"
TOML = "".join(f"\\u{ord(one):04x}" if is_obeyed(one) else one for one in EVIL)
RECIPE = f"""
[job]
description = "{TOML}"
dump_folder = "run{TOML}"
device = "cpu"
[model]
name = "llama3"
flavor = "debug"
tokenizer = "byte"
args = {{dim = 16, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 16}}
[training]
steps = 2
seq_len = 16
local_batch_size = 1
global_batch_size = 2
[data]
packing = "concatenate"
[[data.mixture]]
name = "web{TOML}"
dataset = "json"
dataset_path = "web{TOML}.jsonl"
[[data.mixture]]
name = "code{TOML}"
dataset = "json"
dataset_path = "web{TOML}.jsonl"
[sample]
prompts = ["x{TOML}"]
freq = 1
max_new_tokens = 4
[checkpoint]
enable = true
[metrics]
log_freq = 1
"""
RUN = f"run{EVIL}"
COMMANDS = (
    ("config", "check", "my.toml"), ("config", "show", "my.toml"), ("job", "show", "my.toml"), ("model", "show", "my.toml"),
    ("data", "inspect", "my.toml"), ("data", "step", RUN, "1"), ("data", "where", RUN, f"web{EVIL}"),
    ("checkpoint", "list", RUN), ("checkpoint", "show", RUN), ("checkpoint", "verify", RUN),
    ("checkpoint", "convert", RUN, f"exported{EVIL}"), ("report", RUN), ("watch", RUN, "--once"), ("analyse", RUN),
    ("generate", RUN, "--prompt", f"x{EVIL}", "--max-new-tokens", "2"), ("run", "branch", RUN, f"branched{EVIL}"),
    ("train", f"no{EVIL}.toml"), ("train", "my.toml", f"--training.{EVIL}", "1"), (f"{EVIL}",),
    ("--plugin", f"{EVIL}.py", "plugins"),
)  # fmt: skip


def obeyed(text: str) -> list[str]:
    return [line for line in text.split("\n") if any(is_obeyed(one) for one in line)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with the recipe and its run, and what the run has printed."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / f"web{EVIL}.jsonl").write_text("".join(json.dumps({"text": f"text {EVIL} {n}"}) + "\n" for n in range(50)))
    (folder / "my.toml").write_text(RECIPE)
    status, out, err = titan(folder, "train", "my.toml")
    assert status == 0, err
    with (folder / RUN / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 2, "time": 1.7e9, f"score/{EVIL}": 1.0}) + "\n")
    with (folder / RUN / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "finding", "time": 1.7e9, "step": 2, "kind": EVIL, "message": EVIL}) + "\n")
    yield folder, out + err
    shutil.rmtree(folder)


def titan(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Return the status of a command, and what it prints, with carriage returns."""
    done = subprocess.run([sys.executable, "-m", "titan_core", *arguments], cwd=folder, capture_output=True, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_a_training_run_prints_no_escape_sequence(trained: tuple[Path, str]) -> None:
    _, printed = trained
    assert obeyed(printed) == []
    assert "web\\x1b]0;owned" in printed  # the name of a dataset, in the line about the data


@pytest.mark.parametrize("command", rows(map(" ".join, COMMANDS), [" ".join(COMMANDS[0]), " ".join(COMMANDS[4])]))
def test_no_command_prints_an_escape_sequence(command: str, trained: tuple[Path, str]) -> None:
    folder, _ = trained
    (arguments,) = (one for one in COMMANDS if " ".join(one) == command)
    _, out, err = titan(folder, *arguments)
    assert "Traceback" not in err, err
    # The text of a model is a result, and raw unless the output is a terminal.
    assert obeyed(err if arguments[0] == "generate" else out + err) == []
    if arguments[:2] == ("config", "show"):
        assert parse_toml(out)["data"]["mixture"][0]["name"] == f"web{EVIL}"


def test_what_may_come_from_others_is_printed_by_one_function() -> None:
    found = set()
    for file in PACKAGES.glob("*/src/**/*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "print(" in text else ():
            is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            if is_print and not all(isinstance(argument, ast.Constant) for argument in cast(ast.Call, node).args):
                found.add(file.as_posix().partition("/src/")[2])
    assert found == set(OWN_OUTPUT), "print it by titan_core.toolkit.text.say"
