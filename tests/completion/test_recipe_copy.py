"""`titan recipe copy`: comments, what it removes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from titan_completion.recipe_copy import commented_copy
from titan_core.api import Recipe, UserError
from titan_core.api.config.toml import parse_toml
from titan_core.cli.main import main
from titan_core.plugins.registry import Components


class _Written(Recipe):
    """A recipe in a file of the test."""

    @property
    def file(self) -> Path:
        return Path(self.path)


def copied(text: str) -> str:
    Path("written.toml").write_text(dedent(text))
    recipe = _Written(name="written", summary="", package="", path="written.toml")
    return commented_copy(recipe, Components.from_installed())


def test_documentation_stands_above_the_comments_of_each_key(in_tmp: Path) -> None:
    assert copied(
        """\
        # A recipe

        [model]
        name = "tiny"
        flavor = "debug"

        [training]
        # our reason
        steps = 3  # at the end

        [model.args]
        n_layers = 2
        """
    ) == dedent(
        """\
        # A recipe

        [model]
        # Model family (see `titan plugins`). Default: the installed one, if it is the only one that is not for tests.
        # [str]
        name = "tiny"
        # Size of the model, by name. Empty: model.args describes the whole model. [str, default "debug"]
        flavor = "debug"

        [training]
        # Number of optimizer steps. [int, default 1000]
        # our reason
        steps = 3  # at the end

        [model.args]
        # Number of transformer blocks. [int, the flavor has 6]
        n_layers = 2
        """
    )


ODD = {
    "a value of several lines that looks like keys": '[job]\ndescription = """\n[training]\nsteps = 3\n# x"""\n',
    "a list of several lines": '[plugins]\ndisable = [\n  "a", # = \n  "b",\n]\n',
    "dotted keys": "training.steps = 3\noptimizer.lr = 1e-3\n",
    "an array of tables": '[[data.mixture]]\ndataset = "stdlib"\nweight = 1.0\n\n[[data.mixture]]\ndataset = "x"\n',
    "quoted and indented keys": '[ "training" ]\n  "steps" = 3\n  seq_len=32\n',
    "inline tables": '[model]\nargs = { n_layers = 2, "dim" = 32 }\n[training]\nsteps = 3\n',
    "unknown names": '[nothing]\nmuch = 1\n[training]\nstepss = 2\n[model]\nname = "none"\nargs.x = 1\n',
    "without a final newline": "[training]\nsteps = 3",
    "empty": "",
    "sections that are no tables": 'model = 3\njob = "x"\n',
    "names that are no texts": "[model]\nname = [1]\nflavor = {}\n",
    "other line ends in a text": '[job]\ndescription = "a\u2028b"\n',
}


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_no_comment_changes_a_value(in_tmp: Path, text: str) -> None:
    assert parse_toml(copied(text)) == parse_toml(text)


@pytest.mark.parametrize(
    "text",
    [
        '[job]\ndump_folder = "x"\ndescription = "y"\n',
        'job.dump_folder = """\nx\n"""\njob.description = "y"\n',
        '[job]\ndescription = "y"\n"dump_folder" = "x" # why\n',
    ],
)
def test_the_copy_has_no_directory(in_tmp: Path, text: str) -> None:
    copy = copied(text)
    assert parse_toml(copy) == {"job": {"description": "y"}}
    assert "dump_folder" not in copy


def test_a_directory_that_cannot_be_removed_is_refused(in_tmp: Path) -> None:
    with pytest.raises(UserError, match=r"recipe 'written': sets job\.dump_folder in a form that cannot be removed"):
        copied('job = { dump_folder = "x" }\n')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tinny", "my.toml"], "recipe 'tinny': no installed plugin provides this recipe; did you mean 'tiny'?"),
        (["tiny", "my"], "my: must end in .toml; write to my.toml"),
        (["tiny", "my.json"], "my.json: must end in .toml; write to my.toml"),
        (["tiny", "folder"], "folder: must end in .toml; write to folder/tiny.toml"),
        (["tiny", "there.toml"], "there.toml: exists already; add --force to overwrite it, or name another file"),
        (["tiny", "none/my.toml"], "none/my.toml: cannot be written: No such file or directory; name another file"),
        (["tiny", "folder.toml", "--force"], "folder.toml: cannot be written: Is a directory; name another file"),
        (["tiny"], "needs the name of a recipe and a FILE, or --model; write `titan recipe copy NAME FILE`"),
    ],
)
def test_mistakes(in_tmp: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    Path("folder.toml").mkdir()
    Path("there.toml").write_text("kept")
    assert main(["recipe", "copy", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert Path("there.toml").read_text() == "kept"


def test_force_overwrites(in_tmp: Path) -> None:
    Path("there.toml").write_text("old")
    assert main(["recipe", "copy", "tiny", "there.toml", "--force"]) == 0
    assert Path("there.toml").read_text().startswith("# A copy of recipe tiny.")


def test_a_recipe_is_suggested_by_its_beginning() -> None:
    from titan_core.toolkit.errors import nearest

    assert nearest("llama3_10m", ["llama3_8b", "llama3_10m_laptop", "llama3_1b"]) == "did you mean 'llama3_10m_laptop'?"
