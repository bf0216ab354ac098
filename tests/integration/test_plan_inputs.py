"""``titan plan`` of a model instead of a recipe, and on several machines and numbers of GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.fake_cuda import why_not
from titan_core.api.config.toml import parse_toml
from titan_core.cli.main import main
from titan_testing.jobs import make_job

FILE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 288, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
ONE_WAY = [
    *("--parallelism.pipeline_parallel_degree", "1", "--parallelism.context_parallel_degree", "1"),
    *("--parallelism.tensor_parallel_degree", "1", "--training.global_batch_size", "16", "--compile.enable", "false"),
]


@pytest.fixture
def small(in_tmp: Path) -> str:
    """A folder with the description of a model, and nothing else."""
    folder = in_tmp / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FILE))
    return "small"


@pytest.mark.quick_rows(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "small", "--seq-len", "8192", "--gpus", "2"], "training.seq_len = 8192"),
        (["--model", ".", "--seq-len", "64", "--gpus", "2"], "--model .: contains neither config.json nor params.json"),
        (["--model", "nowhere", "--seq-len", "64", "--gpus", "2"], "--model nowhere: is neither a folder nor the name"),
        (["--model", "llama3/9B", "--seq-len", "64", "--gpus", "2"], "--model llama3/9B: model 'llama3' has no such flavor"),
        (["--model", "org/Name", "--seq-len", "64", "--gpus", "2"], "--model org/Name: cannot be downloaded"),
        (["llama3_debug", "--model", "small", "--seq-len", "64", "--gpus", "2"], "replaces the recipe llama3_debug"),
        (["llama3_debug", "--gpus", "2", "--max-gpus", "4"], "not allowed with argument --gpus"),
        (["llama3_debug"], "one of the arguments --gpus --max-gpus is required"),
        (["llama3_debug", "--gpus", "2", "--tokens", "2TB"], "'2TB' is not a number of tokens, such as 300B, 2T or 1e12"),
        (["llama3_debug", "--gpus", "2", "--tokens", "2"], "--tokens 2: is less than one step, of 4,096 tokens each"),
        (
            ["llama3_debug", "--gpus", "2", "--tokens", "1T", "--price", "b200=4"],
            "--price b200=4: no such device is planned",
        ),
        (["llama3_debug_stages", "--gpus", "2", "--tokens", "1T"], "--tokens: the recipe has [[stages]]"),
        (
            ["llama3_debug", "--max-gpus", "4", "--training.global_batch_size", "-1"],
            "command line: training.global_batch_size = -1: each number of GPUs would train with a global batch of its own",
        ),
        (["llama3_debug", "--max-gpus", "4", "--training.stepz", "4"], "training.stepz"),
    ],
)
def test_mistakes_have_one_clear_error(
    arguments: list[str], message: str, small: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def planned(*arguments: str) -> Any:
    """Return the plan, made in a process of its own."""
    command = [sys.executable, "-m", "titan_core", "plan", *arguments, "--finalists", "1", "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.full
@pytest.mark.fake_cuda
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_model_without_a_recipe_is_planned_and_its_recipe_can_train(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--tokens", "1M", "--price", "2", "--out", "planned.toml"]
    plan = planned("--model", small, "--seq-len", "64", "--gpus", "2", *ONE_WAY, *out)
    assert plan["run"]["steps"] == -(-1_000_000 // (16 * 64))
    seconds = plan["run"]["steps"] * plan["best"][0]["step_seconds"]
    assert plan["run"]["price"] == pytest.approx(seconds / 3600 * 2 * 2)
    text = Path("planned.toml").read_text()
    assert text.startswith("# Planned by `titan plan --model small --seq-len 64 --gpus 2 --tokens 1000000 --parallelism.")
    assert "# Trains small from random weights. Set before `titan train`:\n# training.dataset (stdlib stands in)" in text
    recipe = parse_toml(text)
    assert recipe["training"]["steps"] == plan["run"]["steps"] and recipe["training"]["global_batch_size"] == 16
    assert (recipe["model"]["name"], recipe["model"]["tokenizer"]) == ("qwen3", "byte")
    assert main(["config", "check", "planned.toml"]) == 0
    job = make_job("planned.toml", world_size=2)
    assert dict(job.mesh.degrees) == {name: plan["best"][0]["mesh"][name] for name in job.mesh.degrees}
    assert (job.model.layout.dim, job.batch.seq_len) == (64, 64)


@pytest.mark.full
@pytest.mark.fake_cuda
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_each_row_of_a_table_is_the_plan_of_its_machine_and_number_of_gpus(small: str) -> None:
    given = ["--model", small, "--seq-len", "64", *ONE_WAY]
    table = planned(*given, "--max-gpus", "2", "--device", "h100,b200", "--tokens", "1M")
    assert [(row["name"], row["gpus"]) for row in table["rows"]] == [("h100", 1), ("h100", 2), ("b200", 1), ("b200", 2)]
    assert table["complete"] and all(row["complete"] and row["run"]["days"] > 0 for row in table["rows"])
    alone = planned(*given, "--gpus", "2", "--device", "b200")
    assert table["rows"][3]["best"] == alone["best"]
