"""Recipes, overrides and the errors for mistakes in them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from titan_core.api import OptimizerSection, Section, UserError
from titan_core.api.config.sections import CORE_SECTIONS, ModelSection, TrainingSection
from titan_core.config.load import load_config
from titan_core.config.render import to_toml
from titan_core.plugins.registry import Components
from titan_core.toolkit.arguments import parse_overrides
from titan_core.toolkit.fields import field_docs

REGISTRY = Components.from_installed()


def load(text: str, tmp_path: Path, *overrides: str):  # type: ignore[no-untyped-def]
    file = tmp_path / "my.toml"
    file.write_text(text)
    return load_config(str(file), parse_overrides(overrides), REGISTRY)[0]


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[training]\nsteps = 5\nsteps =\n", [], r"my\.toml:3: not valid TOML: .*fix this line: steps ="),
        ("[training]\nstepz = 5", [], r"my\.toml: training\.stepz = 5: unknown key; did you mean 'steps'\?"),
        ("[training]\nsteps = 'many'", [], r"my\.toml: training\.steps = \"many\": must be a whole number, greater than 0"),
        ("[training]\nsteps = 2.5", [], r"training\.steps = 2\.5: must be a whole number, greater than 0"),
        ("[training]\nsteps = true", [], r"training\.steps = true: must be a whole number, greater than 0"),
        ("[training]\nsteps = 0", [], r"training\.steps = 0: must be greater than 0"),
        ("[training]\non_nan = 'pray'", [], r"training\.on_nan = \"pray\": must be 'stop', 'skip', 'warn' or 'ignore'"),
        ("[trainin]\nsteps = 5", [], r"\[trainin\]: no installed plugin owns this section; did you mean 'training'"),
        ("steps = 5", [], r"steps = 5: is outside of any section"),
        ("training = 5", [], r"training = 5: is outside of any section"),
        (
            "[[optimizer.param_groups]]\npatern = '*'",
            [],
            r"param_groups\[0\]\.patern = \"\*\": unknown key; did you mean 'patt",
        ),
        ("", ["--training.steps", "x"], r"command line: training\.steps = \"x\": must be a whole number, greater than 0"),
        ("", ["--training.stepz=3"], r"command line: training\.stepz = 3: unknown key"),
        ("", ["--traning.steps", "3"], r"command line: --traning\.\*: no installed plugin owns this section"),
        ("", ["--training.deterministic"], r"command line: --training\.deterministic: needs a value"),
        ("", ["--training.steps.more", "3"], r"command line: --training\.steps\.more|training\.steps = "),
        ("", ["-x"], r"command line: -x: neither an option"),
        ("[plugins]\ndisable = ['harnes']", [], r"no plugin is named 'harnes'; did you mean 'harness'"),
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


@pytest.mark.parametrize(("recipe", "message"), [("tinny", "did you mean 'tiny'"), ("no.toml", "does not exist")])
def test_unknown_recipes(recipe: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(recipe, [], REGISTRY)


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
        "--plugins.disable", '["harness_parallel"]',
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
    config, _ = load_config("tiny", parse_overrides(["--model.args.n_layers", "2"]), REGISTRY)
    again = load(to_toml(config), tmp_path)
    assert again.as_dict() == config.as_dict()
    assert config.as_dict()["job"]["dump_folder"] == "outputs/tiny"


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


OPTIONAL = "[training]\nsteps = 5\n[wings]\nspan = 3\n[plugins]\noptional = ['wings', 'training', 'other']"


def test_a_section_of_a_missing_plugin_is_omitted_if_the_recipe_says_so(tmp_path: Path) -> None:
    config = load(OPTIONAL, tmp_path)
    assert config.section(TrainingSection).steps == 5
    assert [note.partition(":")[0] for note in config.notes] == ["[wings] is omitted"]
    assert "wings" not in config.as_dict()
    again = load(to_toml(config), tmp_path)
    assert again.as_dict() == {**config.as_dict(), "job": again.as_dict()["job"]} and not again.notes


@pytest.mark.parametrize(
    ("text", "overrides"),
    [(OPTIONAL.replace("'wings', ", ""), []), (OPTIONAL, ["--wings.span", "4"]), (OPTIONAL, ["--plugins.optional", "[]"])],
)
def test_it_is_an_error_otherwise_and_if_the_command_line_sets_it(tmp_path: Path, text: str, overrides: list[str]) -> None:
    with pytest.raises(UserError, match="no installed plugin owns this section"):
        load(text, tmp_path, *overrides)


def test_an_optional_section_without_its_plugin_is_omitted_with_a_note(tmp_path: Path) -> None:
    config = load("[checkpoint]\nenable = true\n[plugins]\noptional = ['checkpoint']", tmp_path)
    (note,) = config.notes
    assert note.startswith("[checkpoint] is omitted: no ")  # titan-completion, if installed, knows of which package
