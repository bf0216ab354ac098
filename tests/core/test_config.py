"""Recipes, overrides and the errors for mistakes in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import tomli

from titan_core.api.errors import UserError
from titan_core.api.section import Section
from titan_core.api.sections import CORE_SECTIONS, ModelSection, OptimizerSection, TrainingSection
from titan_core.api.tools.arguments import parse_overrides
from titan_core.config.docs import field_docs
from titan_core.config.load import load_config
from titan_core.config.render import describe_options, to_toml
from titan_core.config.schema import json_schema
from titan_core.plugins.registry import Registry

REGISTRY = Registry.from_installed()


def load(text: str, tmp_path: Path, *overrides: str):  # type: ignore[no-untyped-def]
    file = tmp_path / "my.toml"
    file.write_text(text)
    return load_config(str(file), parse_overrides(overrides), REGISTRY)[0]


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[training]\nsteps = 5\nsteps =\n", [], r"my\.toml:3: not valid TOML: .*fix this line: steps ="),
        ("[training]\nstepz = 5", [], r"my\.toml: training\.stepz = 5: unknown key; did you mean 'steps'\?"),
        (
            "[training]\nsteps = 'many'",
            [],
            r"my\.toml: training\.steps = \"many\": must be a whole number, greater than 0 and at most 1000000000",
        ),
        (
            "[training]\nsteps = 2.5",
            [],
            r"training\.steps = 2\.5: must be a whole number, greater than 0 and at most 1000000000",
        ),
        (
            "[training]\nsteps = true",
            [],
            r"training\.steps = true: must be a whole number, greater than 0 and at most 1000000000",
        ),
        ("[training]\nsteps = 0", [], r"training\.steps = 0: must be greater than 0"),
        ("[training]\non_nan = 'pray'", [], r"training\.on_nan = \"pray\": must be 'stop', 'skip', 'warn' or 'ignore'"),
        ("[trainin]\nsteps = 5", [], r"\[trainin\]: no installed plugin owns this section; did you mean 'training'"),
        ("steps = 5", [], r"steps = 5: a key outside of any section"),
        ("training = 5", [], r"training = 5: a key outside of any section"),
        (
            "[[optimizer.param_groups]]\npatern = '*'",
            [],
            r"param_groups\[0\]\.patern = \"\*\": unknown key; did you mean 'patt",
        ),
        (
            "",
            ["--training.steps", "x"],
            r"command line: training\.steps = \"x\": must be a whole number, greater than 0 and at most 1000000000",
        ),
        ("", ["--training.stepz=3"], r"command line: training\.stepz = 3: unknown key"),
        ("", ["--traning.steps", "3"], r"command line: --traning\.\*: no installed plugin owns this section"),
        ("", ["--training.deterministic"], r"command line: --training\.deterministic: a value is needed"),
        ("", ["--training.steps.more", "3"], r"command line: --training\.steps\.more|training\.steps = "),
        ("", ["-x"], r"command line: -x: not an option"),
        ("[plugins]\ndisable = ['lama']", [], r"no plugin is named 'lama'; did you mean 'llama'"),
    ],
)
def test_mistakes_are_reported_with_place_reason_and_fix(
    text: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(text, tmp_path, *overrides)
    assert all("\n" not in str(problem) for problem in caught.value.problems)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load("[training]\nstepz = 1\nseq_len = 'a'\n[optimizer]\nlr = -1.0\n[nonsense]\n", tmp_path)
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("recipe", "message"), [("llama3_debgu", "did you mean 'llama3_debug'"), ("no.toml", "No such file")]
)
def test_unknown_recipes(recipe: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(recipe, [], REGISTRY)


def test_a_section_of_a_missing_package_names_it(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[parallelism]\nfsdp_reshard_after_forward = 'never'\n[quantize]\n")
    with pytest.raises(UserError, match="titan-float8 is installed, but its present version") as caught:
        load_config(str(file), [], REGISTRY.without(["parallel"]))
    assert 'fsdp_reshard_after_forward = "never": unknown key; titan-parallel is switched off' in str(caught.value)


def test_overrides_are_read_as_their_keys_types(tmp_path: Path) -> None:
    config = load(
        "[training]\nsteps = 7\n",
        tmp_path,
        "--training.seq-len=64",
        "--training.deterministic", "true",
        "--optimizer.lr", "1",
        "--training.dataset_path", "123",
        "--model.tokenizer_path", "none",
        "--model.args.n_layers", "3",
        "--plugins.disable", '["debug"]',
        "--optimizer.param_groups", '[{pattern = "*norm*", weight_decay = 0.5}]',
    )  # fmt: skip
    training = config.section(TrainingSection)
    assert (training.steps, training.seq_len, training.deterministic, training.dataset_path) == (7, 64, True, "123")
    assert config.section(OptimizerSection).lr == 1.0
    assert config.section(ModelSection).tokenizer_path is None
    assert config.section(ModelSection).args == {"n_layers": 3}
    groups = config.section(OptimizerSection).param_groups
    assert groups is not None
    assert (groups[0].pattern, groups[0].weight_decay) == ("*norm*", 0.5)
    assert config.where("training.seq_len", 64) == "command line: training.seq_len = 64"
    assert config.where("training.steps", 7).endswith("my.toml: training.steps = 7")


def test_a_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    config, _ = load_config("llama3_debug", parse_overrides(["--model.args.n_layers", "2"]), REGISTRY)
    again = load(to_toml(config), tmp_path)
    assert again.as_dict() == config.as_dict()
    assert config.as_dict()["job"]["dump_folder"] == "outputs/llama3_debug"


def test_every_key_is_documented_in_help_and_schema() -> None:
    sections = REGISTRY.sections()
    text = describe_options(sections)
    schema = json_schema(REGISTRY)
    for name, cls in ((name, cls) for name, owners in sections.items() for cls in owners):
        for key in cls.model_fields:
            assert f"--{name}.{key} " in text
            assert field_docs(cls)[key], f"{name}.{key} has no docstring"
            assert schema["properties"][name]["properties"][key]["description"] == field_docs(cls)[key]
    assert "n_kv_heads" in json.dumps(schema["$defs"])


def test_recipes_fit_the_schema() -> None:
    import jsonschema

    from titan_core.api.components import Recipe

    for recipe in REGISTRY.all(Recipe):
        jsonschema.validate(tomli.loads(recipe.file.read_text()), json_schema(REGISTRY))


def test_sections_are_immutable_and_strict() -> None:
    class Mine(Section):
        section: ClassVar[str] = "mine"

        size: int = 3
        """How
        large."""

    assert field_docs(Mine) == {"size": "How large."}
    with pytest.raises(ValueError, match="frozen"):
        Mine().size = 4
    assert len({cls.section for cls in CORE_SECTIONS}) == len(CORE_SECTIONS)
