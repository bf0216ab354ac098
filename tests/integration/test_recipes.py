"""Recipes of the installed plugins: each is valid, may be copied, and says where its numbers come from."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from titan_core.api import Config, OptimizerSection, Recipe
from titan_core.api.config.sections import LRSchedulerSection, ModelSection, TrainingSection
from titan_core.cli.main import main
from titan_core.config.load import load_config
from titan_core.plugins.registry import Components
from titan_models_llama.config import FLAVORS
from titan_models_llama.model import Llama

RECIPES = Components.from_installed().names(Recipe)
WITHOUT_FILES = ("llama3_debug", "llama3_10m_laptop")
PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_passes_config_check(in_tmp: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", name]) == 0
    shown = capsys.readouterr().out
    assert f"{name}: valid for" in shown
    assert name not in WITHOUT_FILES or "note:" not in shown


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("name", RECIPES)
def test_the_copy_of_each_recipe_has_the_same_config(in_tmp: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "copy", name, "my.toml"]) == 0
    assert "my.toml: a copy of" in capsys.readouterr().out
    registry = Components.from_installed()
    ours, theirs = (load_config(recipe, [], registry)[0].as_dict() for recipe in ("my.toml", name))
    assert ours["job"].pop("dump_folder") == "outputs/my"
    assert theirs["job"].pop("dump_folder") == f"outputs/{name}"
    assert ours == theirs
    text = Path("my.toml").read_text().partition("[[stages]]")[0]
    keys = [line for line in text.splitlines() if re.match(r"[a-z_]+ = ", line)]
    assert keys and all(_lines_above(line, text) for line in keys)


def _lines_above(line: str, text: str) -> str:
    """Return the documentation above the key in ``line``: its type stands in brackets."""
    above = text[: text.index(f"\n{line}")].rpartition("\n\n")[2]
    return "".join(re.findall(r"\[[^\]]*(?:str|int|float|bool|\|)", above))


def _config(name: str) -> Config:
    return load_config(name, [], Components.from_installed())[0]


SCALED = {"llama3_50m_gpu": 1, "llama3_150m_gpu": 1, "llama3_400m_gpu": 1, "llama3_1b": 8, "llama3_3b": 8}
"""Recipes with the budget and the hyperparameters that their comments derive -> number of GPUs."""


@pytest.mark.parametrize("name", SCALED)
def test_budget_batch_and_learning_rate_follow_the_papers(name: str) -> None:
    config = _config(name)
    training, parameters = config.section(TrainingSection), FLAVORS[config.section(ModelSection).flavor].num_params
    batch = training.global_batch_size * training.seq_len
    tokens = training.steps * batch
    assert tokens / parameters == pytest.approx(20, rel=0.002)  # arXiv 2203.15556
    compute = 6 * parameters * tokens
    assert config.section(OptimizerSection).lr == pytest.approx(0.3118 * compute**-0.125, rel=0.05)  # arXiv 2401.02954
    assert abs(math.log(batch / (0.2920 * compute**0.3271))) < math.log(1.2)
    assert 0.02 < config.section(LRSchedulerSection).warmup_steps / training.steps < 0.05
    assert training.global_batch_size % (training.local_batch_size * SCALED[name]) == 0


def test_the_page_lists_each_flavor_with_its_real_size() -> None:
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
    sizes = {row[0]: row[1:] for row in rows if row[0] in FLAVORS}
    assert list(sizes) == list(FLAVORS)
    for name, args in FLAVORS.items():
        with torch.device("meta"):
            model = Llama(args)
        total = sum(parameter.numel() for parameter in model.parameters())
        blocks = total - model.tok_embeddings.weight.numel()
        shape = f"{args.n_layers} x {args.dim:,}, {args.n_heads} / {args.n_kv_heads} heads, {args.ffn_dim:,}"
        assert sizes[name][:4] == [shape, f"{args.vocab_size:,}", f"{total:,}", f"{blocks:,}"]
        assert args.num_params == total


def test_the_page_lists_each_recipe_of_llama() -> None:
    listed = set(re.findall(r"^\| .*`(llama3_\w+)` \|$", PAGE, re.MULTILINE))
    assert listed == {name for name in RECIPES if name.startswith("llama3_") and not name.endswith("_stages")}
    assert all(f"`{name}`" in PAGE for name in RECIPES if name.startswith("llama3_"))
