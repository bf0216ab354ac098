"""Misspelt arguments are refused with the nearest right one; boolean keys need no value."""

from __future__ import annotations

import pytest
import tomli

from titan_core.cli.main import main
from titan_core.toolkit.errors import close_names


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("titan: error: ") and "Traceback" not in error
    return error


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--steps", "5"], "--steps: no such option; did you mean --training.steps 5 or --validation.steps 5?"),
        (["--steps=5"], "--steps=5: no such option; did you mean --training.steps 5 or"),
        (["-steps", "5"], "did you mean --training.steps 5 or"),
        (["--lr", "1e-3"], "did you mean --optimizer.lr 1e-3?"),
        (["--learning-rate", "1e-3"], "did you mean --optimizer.lr 1e-3?"),
        (["--batch-size", "4"], "did you mean --training.local_batch_size 4 or --training.global_batch_size 4?"),
        (["--tensor_parallel_degree", "2"], "did you mean --parallelism.tensor_parallel_degree 2?"),
        (["--tensor-parallel-degree", "2"], "did you mean --parallelism.tensor_parallel_degree 2?"),
        (["--training-steps", "5"], "did you mean --training.steps 5?"),
        (["--n_layers", "4"], "did you mean --model.args.n_layers 4?"),
        (["--enable"], "did you mean --validation.enable?"),
        (["--no-such-thing", "1"], "--no-such-thing: no such option; see `titan config check --help`"),
        (["--count", "1"], "--count: no such option; see `titan config check --help`"),
        (["--world_size", "1"], "did you mean --world-size 1?"),
        (["--training.step", "5"], "training.step = 5: unknown key; did you mean 'steps'?"),
        (["--parallelism.tensor-parallel-degre", "2"], "did you mean 'tensor_parallel_degree'?"),
        (["--training.lr", "1"], "training.lr = 1: unknown key; did you mean 'optimizer.lr'?"),
        (["--trainig.steps", "5"], "did you mean 'training'?"),
        (["--training.stepz"], "unknown key; did you mean 'steps'?"),
        (["--training.steps"], "--training.steps: needs a value; write --training.steps VALUE, where VALUE is int"),
        (["--training.steps", "--json"], "--training.steps: needs a value"),
        (["training.steps=5"], "training.steps=5: is neither a recipe nor a file; write overrides as --training.steps=5"),
        (["tiny", "training.steps=5"], "does not expect this argument; write overrides as --training.steps=5"),
        (["--world-siz", "2", "tiny"], "--world-siz: no such option; did you mean --world-size 2?"),
        (["tiny", "more"], "more: `titan config check` does not expect this argument"),
        (["Tiny"], "Tiny: is neither a recipe nor a file; did you mean 'tiny'?"),
        (["tiny", "--optimizer.name", "Adamw"], "did you mean 'AdamW'?"),
        (["tiny", "--optimizer.name", "ADAM"], "did you mean 'Adam'?"),
        (["tiny", "--training.dataset", "Stdlib"], "did you mean 'stdlib'?"),
        (["tiny", "--model.name", "TINY"], "did you mean 'tiny'?"),
        (["tiny", "--model.flavor", "Debug"], "did you mean 'debug'?"),
        (["tiny", "--model.tokenizer", "bytes"], "did you mean 'byte'?"),
        (["tiny", "--lr_scheduler.name", "WSD"], "did you mean 'wsd'?"),
        (["tiny", "--objective.name", "next-token"], "did you mean 'next_token'?"),
        (["tiny", "--job.device", "CUDA"], "must be 'auto', 'cpu' or 'cuda'; did you mean 'cuda'?"),
        (["tiny", "--training.on_nan", "Skip"], "did you mean 'skip'?"),
        (["tiny", "--plugins.disable", '["Harness"]'], "no plugin is named 'Harness'; did you mean 'harness'?"),
    ],
)
def test_a_misspelt_argument_is_refused_with_the_right_one(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = [] if "tiny" in arguments or "ecipe" in why else ["tiny"]
    error = refused(["config", "check", *recipe, *arguments], capsys)
    assert why in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["trian"], "titan trian: no such command; did you mean 'train'?"),
        (["Train"], "did you mean 'train'?"),
        (["confg", "show"], "did you mean 'config'?"),
        (["config", "shwo"], "titan config shwo: no such command; did you mean 'show'?"),
        (["--verison"], "titan --verison: no such option; did you mean '--version'?"),
        (["plugins", "--jsn"], "did you mean --json?"),
    ],
)
def test_a_misspelt_command_is_refused_with_the_right_one(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["tiny", "--training.deterministic"], True),
        (["--training.deterministic", "tiny"], True),
        (["--training.deterministic", "true", "tiny"], True),
        (["--training.deterministic=true", "tiny"], True),
        (["--training.deterministic", "--training.steps", "3", "tiny"], True),
        (["--training.deterministic", "--no-training.deterministic", "tiny"], False),
        (["--no-training.deterministic", "tiny"], False),
        (["--training.deterministic", "false", "tiny"], False),
        (["--training.deterministic=false", "tiny"], False),
    ],
)
def test_a_boolean_key_needs_no_value(arguments: list[str], value: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", *arguments]) == 0
    table = tomli.loads(capsys.readouterr().out)
    assert table["training"]["deterministic"] is value
    assert table["model"]["name"] == "tiny"  # the recipe was never taken for a value


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["tiny", "--training.deterministic", "True"],
            'training.deterministic = "True": must be a valid boolean; did you mean true?',
        ),
        (
            ["tiny", "--training.deterministic", "no"],
            'training.deterministic = "no": must be a valid boolean; write true or false',
        ),
        (
            ["tiny", "--training.deterministic", "1"],
            "training.deterministic = 1: must be a valid boolean; write true or false",
        ),
        (["--training.deterministic", "ture"], "ture: is neither a recipe nor a file"),
        (["tiny", "--training.deterministic", "ture"], "ture: `titan config show` does not expect this argument"),
        (["--no-training.deterministic", "false"], "--no-training.deterministic: takes no value"),
        (["--no-training.deterministic=false"], "--no-training.deterministic: takes no value"),
        (["--no-training.steps", "tiny"], "--no-training.steps: training.steps is not a boolean, but int"),
        (["--no-training.determinstic", "tiny"], "--no-training.determinstic: unknown key; did you mean 'deterministic'?"),
        (["tiny", "--no-trainig.deterministic"], "did you mean 'training'?"),
    ],
)
def test_a_boolean_that_is_not_clear_is_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert why in refused(["config", "show", *arguments], capsys)


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("Adamw", ["Adam", "AdamW"], ["AdamW"]),
        ("dp", ["cp", "dp_replicate", "dp_shard"], ["dp_replicate", "dp_shard"]),
        ("DP-Shard", ["dp_replicate", "dp_shard"], ["dp_shard"]),
        ("enable_checkpoint", ["enable", "folder"], ["enable"]),
        ("epochs", ["eps", "steps"], []),
        ("", ["a"], []),
    ],
)
def test_near_names(word: str, known: list[str], found: list[str]) -> None:
    assert close_names(word, known) == found
