"""``titan completion``: the scripts, in the shells that are installed; ``titan config schema``."""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from titan_completion.cli import SHELLS, script
from titan_completion.schema import json_schema
from titan_completion.table import _arguments_of, _row, _values_of
from titan_core.api import Command
from titan_core.cli.main import main
from titan_core.plugins.registry import Components
from titan_core.toolkit.launching import Launcher

BASH = """
source {script}
complete -p titan > /dev/null || exit 1
while IFS= read -r line; do
    COMP_LINE=$line COMP_POINT=${{#line}}
    spaced=${{line//=/ = }}  # = is one of COMP_WORDBREAKS
    read -ra COMP_WORDS <<< "$spaced"
    [[ $line == *' ' ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    _titan
    echo "${{COMPREPLY[*]}}"
done
"""
# Completion functions of zsh run in its line editor only: the test replaces what they call there.
ZSH = """
compdef() {{ [[ $1 == _titan && $2 == titan ]] || exit 1 }}
compadd() {{ candidates+=("${{names[@]}}") }}
compset() {{ true }}
_files() {{ candidates+=(${{words[CURRENT]##*=}}*(N)) }}
source {script}
while IFS= read -r line; do
    words=(${{=line}}); [[ $line == *' ' ]] && words+=('')
    CURRENT=${{#words}} candidates=()
    _titan
    print -r -- "${{candidates[*]}}"
done
"""
FISH = """
source {script}
while read line
    echo (complete -C "$line" | string split -f 1 \\t)
end
"""
PROGRAMS = {"bash": BASH, "zsh": ZSH, "fish": FISH}

CASES = {
    "titan tra": "train",
    "titan config ": "show check schema",
    "titan config sh": "show",
    "titan completion ": "bash zsh fish",
    "titan train ti": "tiny",
    "titan train rec": "recipe.toml",
    "titan plugins --j": "--json",
    "titan config check --wor": "--world-size",
    "titan train --lr": "--lr_scheduler.",
    "titan train --optimizer.be": "--optimizer.beta1 --optimizer.beta2",
    "titan train --optimizer.name Adam": "AdamW Adam",
    "titan train --job.device c": "cpu cuda",
    "titan train --training.dataset std": "stdlib",
    "titan train --model.args.n_l": "--model.args.n_layers",
    "titan train --training.dataset_path rec": "recipe.toml",
    "titan train --training.steps ": "",
    "titan train --training.deterministic t": "true tiny",
    "titan train --no-training.det": "--no-training.deterministic",
    "titan train --help val": "validation",
    "titan train tiny --data.on_end ": "repeat stop",
    "titan nothing ": "",
    "titan --pl": "--plugin",
    "titan --plugin rec": "recipe.toml",
    "titan --plugin recipe.toml tra": "train",
    "titan --plugin=a.py --plugin b.py train ti": "tiny",
}
"""Line before the cursor -> candidates."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scripts")
    registry = Components.from_installed()
    files = {shell: folder / shell for shell in SHELLS}
    for shell, file in files.items():
        file.write_text(script(shell, registry), encoding="utf-8")
    return files


def complete(shell: str, script: Path, lines: list[str], folder: Path) -> list[str]:
    """Return what the shell completes for each line."""
    if shutil.which(shell) is None:
        # Only the shell itself can tell what it completes, and few machines have all three.
        pytest.skip(f"runs the completion script in {shell}, which this machine does not have")
    program = PROGRAMS[shell].format(script=script)
    options = {"bash": ["--norc", "-c"], "zsh": ["-f", "-c"], "fish": ["--no-config", "-c"]}[shell]
    result = subprocess.run(
        [shell, *options, program], input="".join(f"{line}\n" for line in lines), capture_output=True, text=True, cwd=folder
    )
    assert result.returncode == 0 and result.stderr == ""
    return result.stdout.split("\n")[: len(lines)]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(shell: str, scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").touch()
    found = complete(shell, scripts[shell], list(CASES), tmp_path)
    expected = {line: sorted(candidates.split()) for line, candidates in CASES.items()}
    assert {line: sorted(words.split()) for line, words in zip(CASES, found, strict=True)} == expected


@pytest.mark.parametrize(("shell", "prefix"), [("bash", ""), ("zsh", ""), ("fish", "--optimizer.name=")])
def test_a_value_after_an_equals_sign(shell: str, prefix: str, scripts: dict[str, Path], tmp_path: Path) -> None:
    """bash and zsh replace the part after the sign, fish the whole word."""
    (words,) = complete(shell, scripts[shell], ["titan train --optimizer.name=A"], tmp_path)
    assert sorted(words.split()) == [f"{prefix}Adam", f"{prefix}AdamW"]


def test_a_completion_is_quick(scripts: dict[str, Path], tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    complete("bash", scripts["bash"], ["titan train --training.s"] * 20, tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime  # other load on the machine does not count
    assert used / 20 < 0.3


def test_every_command_and_key_is_in_the_scripts(scripts: dict[str, Path]) -> None:
    registry = Components.from_installed()
    text = scripts["bash"].read_text(encoding="utf-8")
    assert all(f"\nc\t\t{command.name}\t" in text for command in registry.all(Command))
    for section, owners in registry.sections().items():
        assert all(f"\nk\t\t--{section}.{key}\t" in text for cls in owners for key in cls.model_fields)


def test_the_command_prints_the_script(scripts: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    assert capsys.readouterr().out == scripts["fish"].read_text(encoding="utf-8")
    assert main(["completion", "Bash"]) == 2
    assert "did you mean 'bash'?" in capsys.readouterr().err


def test_config_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["training"]


class One(BaseModel):
    args: dict[str, int] = {}
    """Arguments of the model."""
    first: int = 1


class Other(BaseModel):
    second: str = ""


class Arguments(BaseModel):
    dim: int


def test_a_recipe_may_set_the_keys_of_all_owners_of_a_section_and_no_others() -> None:
    registry: Any = SimpleNamespace(
        sections=lambda: {"model": (One, Other)},
        all=lambda kind: [SimpleNamespace(name="m", flavors={"f": Arguments(dim=1)})],
    )
    schema = json_schema(registry)
    model = schema["properties"]["model"]
    assert set(model["properties"]) == {"args", "first", "second"}
    stage = schema["properties"]["stages"]["items"]
    assert set(stage["properties"]) == {"name", "at_step", "at_tokens", "model"} and not stage["additionalProperties"]
    assert not schema["additionalProperties"] and not model["additionalProperties"]
    # A recipe need not repeat the arguments of its flavor.
    assert model["properties"]["args"]["anyOf"] == [{"$ref": "#/$defs/Arguments"}]
    assert set(schema["$defs"]["Arguments"]["properties"]) == {"dim"} and "required" not in schema["$defs"]["Arguments"]


def test_options_of_a_command_its_groups_and_its_launchers_are_offered_unless_they_are_hidden() -> None:
    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--plain", action="store_true", help="something")
        parser.add_argument("--hidden", help=argparse.SUPPRESS)
        parser.add_argument_group("more").add_argument("--in-a-group", metavar="FILE")
        parser.add_mutually_exclusive_group().add_argument("--either", choices=["a", "b"])

    def of_launcher(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ranks", metavar="N")

    def arguments(add: Callable[[argparse.ArgumentParser], None]) -> Any:
        return SimpleNamespace(load=lambda: add)

    launchers = [SimpleNamespace(arguments=arguments(of_launcher))]
    registry: Any = SimpleNamespace(all=lambda kind: launchers if kind is Launcher else [])
    command: Any = SimpleNamespace(name="mine", arguments=arguments(own), launches=True, overrides=False)
    assert [line.split("\t")[2:4] for line in _arguments_of(command, registry)] == [
        ["--help", "-"], ["--plain", "-"], ["--in-a-group", "/"], ["--either", "a b"], ["--ranks", "@"],
    ]  # fmt: skip
    command.launches = False
    assert not any("--ranks" in line for line in _arguments_of(command, registry))


def test_a_description_is_one_short_sentence() -> None:
    assert _row("c", "train", "  train a model.  More of it.") == "c\ttrain\ttrain a model"
    assert _row("c", "x" * 70).removeprefix("c\t") == "x" * 70
    assert _row("c", "x" * 71).removeprefix("c\t") == "x" * 67 + "..."


def test_an_option_that_is_named_for_a_kind_of_component_completes_its_names() -> None:
    """Such as ``titan eval MODEL --dataset NAME``."""
    action = argparse.ArgumentParser().add_argument("--dataset", metavar="NAME")
    assert "stdlib" in _values_of(action, Components.from_installed()).split()
