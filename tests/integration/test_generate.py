"""`titan generate` agrees with transformers' ``generate``, on one device and on several."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_core.cli.main import main
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe

TP = ["--parallelism.tensor_parallel_degree", "2"]
SCALING = "{factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_seq_len = 32}"
ARGS = (
    "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 96, vocab_size = 288, max_seq_len = 256, "
    f"tie_embeddings = true, rope_scaling = {SCALING}}}"
)
SETTINGS: dict[str, object] = {
    "model.args": ARGS,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.steps": 6,
    "lr_scheduler.warmup_steps": 1,
    "checkpoint.enable": "true",
    "job.device": "cpu",
}
PROMPTS = ["def main(", "import "]
NEW_TOKENS = 200


def generated(folder: str, model: str, *options: str) -> Any:
    """Run the command in this process; return what it prints as JSON, or nothing on other ranks than the first."""
    os.chdir(folder)
    torch.set_num_threads(1)
    printed = io.StringIO()
    prompts = [argument for text in PROMPTS for argument in ("--prompt", text)]
    with contextlib.redirect_stdout(printed):
        assert main(["generate", model, *prompts, "--json", "--job.device", "cpu", *options]) == 0
    return json.loads(printed.getvalue() or "null")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, and its export to Hugging Face's format."""
    folder = tmp_path_factory.mktemp("run")
    with contextlib.chdir(folder):
        run_recipe("llama3_debug", SETTINGS)
        assert main(["checkpoint", "convert", "outputs/llama3_debug/checkpoint/step-6", "hf"]) == 0
        shutil.copytree("hf", "weights", ignore=shutil.ignore_patterns("tokenizer*"))
    return folder


@pytest.fixture(scope="module")
def greedy(run: Path) -> list[list[int]]:
    """The continuations that transformers generates."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    continued = []
    for text in PROMPTS:
        prompt = torch.tensor([[256, *text.encode()]])
        with torch.no_grad():
            ids = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        continued.append(ids[0, prompt.shape[1] :].tolist())
    return continued


GREEDY = ["--max-new-tokens", str(NEW_TOKENS), "--temperature", "0", "--ignore-end"]


@pytest.mark.parametrize("model", ["outputs/llama3_debug", "outputs/llama3_debug/checkpoint/step-6"])
def test_greedy_generation_is_that_of_transformers(run: Path, greedy: list[list[int]], model: str) -> None:
    assert [answer["tokens"] for answer in generated(str(run), model, *GREEDY)] == greedy


@pytest.mark.parametrize("tokenizer", [[], ["--model.tokenizer", "byte"]], ids=["its own", "another"])
def test_a_hugging_face_folder_is_read_as_it_is(run: Path, greedy: list[list[int]], tokenizer: list[str]) -> None:
    answers = generated(str(run), "hf", *GREEDY, *tokenizer)
    assert [answer["tokens"] for answer in answers] == greedy


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(TP, id="TP 2"),
        pytest.param([], id="FSDP 2"),
        pytest.param([*TP, "--parallelism.disable_loss_parallel", "true"], id="TP 2, whole", marks=pytest.mark.full),
    ],
)
def test_several_ranks_generate_the_same(gloo: GlooPool, run: Path, greedy: list[list[int]], mesh: list[str]) -> None:
    first, other = gloo.run(2, generated, str(run), "outputs/llama3_debug", *GREEDY, *mesh)
    assert [answer["tokens"] for answer in first] == greedy
    assert other is None


def test_samples_do_not_depend_on_the_mesh(gloo: GlooPool, run: Path) -> None:
    options = ["--max-new-tokens", "40", "--temperature", "0.8", "--top-p", "0.9", "--seed", "5"]
    alone = generated(str(run), "outputs/llama3_debug", *options)
    assert gloo.run(2, generated, str(run), "outputs/llama3_debug", *options, *TP)[0] == alone
    assert generated(str(run), "outputs/llama3_debug", *options[:-1], "6") != alone


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["outputs/llama3_debug", "--max-new-tokens", "256"], "set --max-new-tokens to at most 255"),
        (["outputs/llama3_debug", "--system", "be kind"], "add --chat"),
        (["outputs/llama3_debug", "--chat", "--prompt", "hi"], "no chat template"),
        (["outputs/llama3_debug", "--temperature", "-1"], "--temperature"),
        (["outputs/llama3_debug", "--prompts", "missing.txt"], "cannot be read"),
        (["outputs/llama3_debug", "--parallelism.pipeline_parallel_degree", "2"], "pipeline_parallel_degree"),
        (["outputs/llama3_debug", "--model.args.dim", "32"], "model.args.dim = 32: contradicts the weights"),
        (["outputs/llama3_debug", "--stop", ""], "--stop: is empty"),
        (["weights", "--prompt", "a"], "model.tokenizer"),
    ],
)
def test_mistakes(run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(run):
        assert main(["generate", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert all(line.startswith("titan: error: ") for line in lines) and message in lines[-1]
