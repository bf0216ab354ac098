"""Help, and commands that need no model, are quick and free of torch, with all packages installed.

Their time, which the load of a machine changes, is left to ``pytest -m long tests/integration/test_startup.py``.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titan_core.api import Command
from titan_core.plugins.registry import Components

REGISTRY = Components.from_installed()
HELP = [[*command.name.split(), "--help"] for command in REGISTRY.all(Command)]
COMMANDS = [
    ["--help"],
    ["--version"],
    ["plugins"],
    ["recipes"],
    ["recipe", "copy", "llama3_debug", "my.toml"],
    ["config", "check"],
    ["config", "show"],
    ["config", "schema"],
    ["job", "show"],
    ["completion", "bash"],
]
QUICK = [["--help"], ["train", "--help"], ["generate", "--help"], ["plugins"], ["config", "check"]]
HEAVY = {"torch", "datasets", "numpy", "rich"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nothing_heavy_is_imported(tmp_path: Path, command: list[str]) -> None:
    program = (
        "import sys\nfrom titan_core.__main__ import main\n"
        f"sys.argv = ['titan', *{command!r}]\nassert main() == 0\n"
        f"print('IMPORTED', sorted({HEAVY!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout.endswith("IMPORTED []\n")


ALL_HELP = """
import contextlib, io, json, sys
from titan_core.cli.main import main
found = {}
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(command)
    found[" ".join(command)] = sorted(set(json.loads(sys.argv[2])) & set(sys.modules))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported_by_help() -> dict[str, list[str]]:
    """Heavy modules after the help of each command, and of those before it, in one process."""
    groups = sorted({command[0] for command in HELP if len(command) == 3})
    commands = [["--help"], *([group, "--help"] for group in groups), *HELP, ["train", "--help", "training"]]
    arguments = [json.dumps(commands), json.dumps(sorted(HEAVY))]
    result = subprocess.run([sys.executable, "-c", ALL_HELP, *arguments], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_the_help_of_a_command_imports_nothing_heavy(command: list[str], imported_by_help: dict[str, list[str]]) -> None:
    assert imported_by_help[" ".join(command)] == []


def test_help_of_groups_and_sections_imports_nothing_heavy(imported_by_help: dict[str, list[str]]) -> None:
    assert len(imported_by_help) > len(HELP) + 5
    assert {command: modules for command, modules in imported_by_help.items() if modules} == {}


@pytest.mark.parametrize("command", QUICK, ids=" ".join)
def test_commands_import_few_modules(command: list[str]) -> None:
    """Imports are what a command's time consists of, and unlike it the same on each machine."""
    arguments = [sys.executable, "-X", "importtime", "-m", "titan_core", *command]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    imported = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    assert 100 < len(imported) < 450


BARE_STEP = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model(torch.randn(2, 2)).sum().backward()
optimizer.step()
"""
TITAN_STEP = """
from titan_core.__main__ import main
options = {"training.steps": 1, "training.seq_len": 64, "checkpoint.enable": "false"}
sys.argv = ["titan", "train", "llama3_debug", *(f"--{key}={value}" for key, value in options.items())]
assert main() == 0
"""


def test_a_job_of_one_device_imports_no_more_of_torch_than_a_bare_loop(tmp_path: Path) -> None:
    """A bare loop's optimizer imports ``torch._dynamo`` and with it ``torch.distributed.tensor``; no job can do without."""
    imported = []
    for program in (BARE_STEP, TITAN_STEP):
        program = f"import sys\n{program}\nprint()\nprint(*sys.modules)"
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
        imported.append(result.stdout.splitlines()[-1].split())
    bare, ours = ({name for name in names if name.split(".")[0] in ("torch", "triton", "sympy")} for names in imported)
    assert "torch" in bare and ours <= bare
    roots = {name.partition(".")[0] for name in imported[1]}
    assert {"titan_core", "torch"} <= roots
    assert not roots & {"datasets", "pandas", "pyarrow", "tiktoken", "tokenizers", "transformers", "torchao", "wandb"}


@pytest.mark.long
@pytest.mark.parametrize("command", QUICK, ids=" ".join)
def test_commands_take_at_most_half_a_second(command: list[str]) -> None:
    """The limit scales with the machine's speed if importing pydantic takes more than 0.1 s: a command takes five times as
    long, on a slow or busy machine too."""

    def seconds(*arguments: str) -> float:
        """Return CPU time, which excludes other load on the machine."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    rounds = [(seconds("-m", "titan_core", *command), seconds("-c", "import pydantic.main")) for _ in range(3)]
    ours, pydantics = (min(times) for times in zip(*rounds, strict=True))
    assert ours < 0.5 * max(1.0, pydantics / 0.1)


def test_an_interrupt_after_the_end_leaves_no_traceback() -> None:
    program = (
        "import atexit, os, signal, sys, threading\nfrom titan_core.__main__ import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['titan', '--version']\nsys.exit(main())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGINT
    assert result.stdout.startswith("titan-core ") and result.stderr == ""
