"""Requirements for every installed package."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import jsonschema
import pytest
import tomli

from ci.house import source_files
from ci.workspace import packages
from titan_completion.schema import json_schema
from titan_core.api import Command, Recipe
from titan_core.cli.main import main
from titan_core.config.render import describe_keys
from titan_core.plugins.registry import Components
from titan_core.toolkit.fields import field_docs
from titan_testing.jobs import make_job

REGISTRY = Components.from_installed()


def test_every_key_is_documented_in_help_and_schema() -> None:
    sections = REGISTRY.sections()
    text = "\n".join(line for name in sections for line in describe_keys(REGISTRY, name))
    schema = json_schema(REGISTRY)
    for name, cls in ((name, cls) for name, owners in sections.items() for cls in owners):
        for key in cls.model_fields:
            assert f"--{name}.{key} " in text
            assert field_docs(cls)[key], f"{name}.{key} has no docstring"
            assert schema["properties"][name]["properties"][key]["description"] == field_docs(cls)[key]
    assert "n_kv_heads" in json.dumps(schema["$defs"])


def test_code_names_keys_that_exist() -> None:
    """Checks and fixes name config keys in strings, which no type checker reads."""
    keys = {name: {key for owner in owners for key in owner.model_fields} for name, owners in REGISTRY.sections().items()}
    files = [file for package in packages() for file in source_files(package) if file.name != "_contents.py"]
    found, unknown = 0, []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            if name := re.fullmatch(r"(\w+)\.(\w+)", node.value):
                section, key = name.groups()
                found += key in keys.get(section, ())
                # A name of a file, or the beginning of a key.
                if key not in keys.get(section, {key}) and key not in {
                    "json",
                    "jsonl",
                    "safetensors",
                    "svg",
                    "rows",
                    "enable_",
                }:
                    unknown.append(f"{file.name}:{node.lineno} {node.value}")
    assert unknown == []
    assert found > 200


def test_recipes_match_the_schema() -> None:
    schema = jsonschema.validators.validator_for({})(json_schema(REGISTRY))
    for recipe in REGISTRY.all(Recipe):
        schema.validate(tomli.loads(recipe.file.read_text()))


def test_all_packages_are_discovered_and_none_is_broken() -> None:
    with_plugins = {name for name, package in packages().items() if package.plugins}
    assert with_plugins <= {plugin.distribution for plugin in REGISTRY.found.plugins}
    assert REGISTRY.found.broken == ()
    assert REGISTRY.conflicts == []


@pytest.mark.parametrize("recipe", ["llama3_8b", "llama3_70b", "llama3_405b"])
def test_large_recipes_are_valid_at_their_scale(recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # The byte tokenizer replaces theirs, because neither the tokenizer's file nor the network is available.
    overrides = ["--model.tokenizer", "byte", "--model.tokenizer_path", "none"]
    assert main(["config", "check", recipe, "--world-size", "512", *overrides]) == 0, capsys.readouterr().err


def test_plugins_are_listed_with_what_they_provide(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    assert "titan-models-llama 0.1.0" in capsys.readouterr().out
    assert main(["plugins", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["broken"] == []
    (parallel,) = (one for one in listing["plugins"] if one["name"] == "parallel")
    assert {"stage": "transform", "name": "fsdp"}.items() <= parallel["provides"][0].items()


def test_the_default_recipe_is_divided_over_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "--world-size", "4"]) == 0
    assert "valid for 4 process(es): dp_shard=4" in capsys.readouterr().out
    assert main(["job", "show", "--world-size", "2"]) == 0
    assert "DATA: fsdp (titan-parallel)" in capsys.readouterr().out


def test_transforms_are_ordered_by_phase_then_name() -> None:
    overrides = {
        "parallelism.pipeline_parallel_degree": 2, "parallelism.tensor_parallel_degree": 2, "compile.enable": "true",
        "activation_checkpoint.mode": "full", "float8.enable": "true", "float8.emulate": "true",
        "compile.components": '["loss"]', "training.global_batch_size": 8,
    }  # fmt: skip
    job = make_job("llama3_debug", overrides, 8)
    assert [(one.phase.name, one.name) for one in job.transforms] == [
        ("PIPELINE", "pipeline_parallel"), ("PRECISION", "float8"), ("TENSOR", "tensor_parallel"),
        ("RECOMPUTE", "activation_checkpoint"), ("COMPILE", "compile"), ("DATA", "fsdp"),
    ]  # fmt: skip


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize(
    "command", [command for command in REGISTRY.all(Command) if command.overrides], ids=lambda one: one.name
)
def test_help_of_a_command_with_overrides_fits_on_a_screen(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 lines, or one per option and 26 others for a command with many options of its own."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([*command.name.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    options = sum(line.startswith("  --") and "SECTION" not in line for line in lines)
    assert len(lines) <= max(40, options + 26)
    assert all(len(line) <= 100 for line in lines)
    assert all(f"{name}," in " ".join(lines) or lines[-1].endswith(name) for name in REGISTRY.sections())
