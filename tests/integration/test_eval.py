"""`titan eval` agrees with transformers, on one device and on several."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ci.workspace import packages
from titan_core.cli.main import main
from titan_core.toolkit import status
from titan_core.toolkit.status import phase
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe

TP = ["--parallelism.tensor_parallel_degree", "2"]
ARGS = "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 96, vocab_size = 258, max_seq_len = 256}"
SETTINGS: dict[str, object] = {
    "model.args": ARGS,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.steps": 3,
    "checkpoint.enable": "true",
    "job.device": "cpu",
}
TEXT = "Thé quick brown föx jumps over the lazy dog, 1234 times. " * 12
RUN = "outputs/llama3_debug"


def evaluated(folder: str, model: str, *options: str) -> Any:
    """Run the command in this process; return what it prints as JSON, or nothing on other ranks than the first."""
    os.chdir(folder)
    torch.set_num_threads(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["eval", model, "--json", "--job.device", "cpu", *options]) == 0
    return json.loads(printed.getvalue() or "null")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, its export to Hugging Face's format, and a text."""
    folder = tmp_path_factory.mktemp("run")
    with contextlib.chdir(folder):
        run_recipe("llama3_debug", SETTINGS)
        assert main(["checkpoint", "convert", f"{RUN}/checkpoint/step-3", "hf"]) == 0
        Path("text.txt").write_text(TEXT)
        Path("records.jsonl").write_text("".join(json.dumps({"text": f"{n} {TEXT}"}) + "\n" for n in range(6)))
    return folder


DATA = ["--dataset", "text", "--dataset-path", "text.txt", "--batch-size", "1"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["eval", f"{RUN}", *DATA], ["loading the model", "validating"]),
        (["generate", RUN, "--prompt", "a", "--max-new-tokens", "2", "--json"], ["loading the model", "generating"]),
        (["generate", RUN, "--prompt", "a", "--prompt", "b", "--max-new-tokens", "2"], ["loading the model", "generating"]),
    ],
)
def test_slow_work_is_shown_while_it_lasts(
    arguments: list[str], shown: list[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[str] = []

    def enter(self: phase) -> phase:
        if status._shown is not None:
            entered.append(self.name)
        return original(self)

    def leave(self: phase, *error: object) -> None:
        details.append(self.detail())
        original_exit(self, *error)

    details: list[str] = []
    original, original_exit = phase.__enter__, phase.__exit__
    monkeypatch.setattr(phase, "__enter__", enter)
    monkeypatch.setattr(phase, "__exit__", leave)
    monkeypatch.chdir(run)
    assert main([*arguments, "--job.device", "cpu"]) == 0
    assert [name for name in entered if name in shown] == shown
    assert re.fullmatch(r"[\d,]+ tokens", next(filter(None, details)))


def test_the_loss_is_that_of_transformers(run: Path) -> None:
    from transformers import LlamaForCausalLM

    ids = torch.tensor([256, *TEXT.encode(), 257])
    model = LlamaForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    total = tokens = 0.0
    for window in ids.split(65):  # a sequence of 64 tokens and the target of the last one
        if len(window) > 1:
            with torch.no_grad():
                total += float(model(window[None], labels=window[None]).loss) * (len(window) - 1)
            tokens += len(window) - 1
    found = evaluated(str(run), RUN, *DATA)
    assert found["tokens"] == tokens
    assert found["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    per_byte = total / tokens / math.log(2) * len(ids) / len(TEXT.encode())
    assert found["bits_per_byte"] == pytest.approx(per_byte, rel=1e-5)
    foreign = evaluated(str(run), "hf", *DATA, "--model.tokenizer", "byte", "--training.seq_len", "64")
    assert foreign["loss"] == pytest.approx(found["loss"], rel=1e-6)


@pytest.mark.parametrize("mesh", [TP, []], ids=["TP 2", "FSDP 2"])
def test_several_ranks_measure_the_same(gloo: GlooPool, run: Path, mesh: list[str]) -> None:
    # Two rows in each batch of the world, so that both meshes read the same rows.
    size = "2" if mesh else "1"
    data = ["--dataset", "json", "--dataset-path", "records.jsonl"]
    alone = evaluated(str(run), RUN, *data, "--batch-size", "2")
    first, other = gloo.run(2, evaluated, str(run), RUN, *data, "--batch-size", size, *mesh)
    assert other is None
    for key in ("tokens", "dataset"):
        assert first[key] == alone[key]
    for key in ("loss", "perplexity", "bits_per_byte"):
        assert first[key] == pytest.approx(alone[key], rel=1e-5)


@pytest.fixture(scope="module")
def tasks(lm_eval_tasks: str) -> list[str]:
    """Options for three tasks."""
    return ["--tasks", "titan_choice,titan_rolling,titan_generate", "--include-path", lm_eval_tasks]


@pytest.mark.full  # lm-eval takes seconds to import and to index its tasks
def test_scores_in_tasks_are_those_of_transformers(run: Path, tasks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.api.instance import Instance
    from transformers import LlamaForCausalLM

    from titan_inference.lm_eval_model import TitanLM

    requests = [("def f(x", "):"), ("a b ", "c"), ("", "hello"), ("x" * 300, " = y")]
    texts = ["short", "long text " * 60]
    reference = LlamaForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)

    def log_likelihood(context: list[int], continuation: list[int]) -> tuple[float, bool]:
        row = torch.tensor([[*context, *continuation][-257:]])
        with torch.no_grad():
            scores = reference(row[:, :-1]).logits[0].log_softmax(-1)[-len(continuation) :]
        wanted = row[0, -len(continuation) :]
        return float(scores.gather(-1, wanted[:, None]).sum()), bool((scores.argmax(-1) == wanted).all())

    def ids(text: str) -> list[int]:
        return list(text.encode())

    expected = [log_likelihood([256, *ids(context)], ids(text)) for context, text in requests]
    expected[1] = log_likelihood([256, *ids("a b")], ids(" c"))  # lm-eval moves spaces to the continuation
    compared: list[TitanLM] = []

    def compare(model: TitanLM, **_: Any) -> dict[str, Any]:
        compared.append(model)
        asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(requests)]
        for (score, greedy), (wanted, agrees) in zip(model.loglikelihood(asked), expected, strict=True):
            assert score == pytest.approx(wanted, rel=1e-5) and greedy is agrees
        rolling = [Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(texts)]
        short, long = model.loglikelihood_rolling(rolling)
        assert short == pytest.approx(log_likelihood([256], ids(texts[0]))[0], rel=1e-5)
        whole = ids(texts[1])
        first = log_likelihood([256], whole[:256])[0]
        rest = whole[256:512], whole[512:]
        second = log_likelihood(whole[255:256], rest[0])[0]
        last = log_likelihood(whole[-257 : -len(rest[1])], rest[1])[0]
        assert long == pytest.approx(first + second + last, rel=1e-5)
        return {"results": {}}

    monkeypatch.setattr("lm_eval.evaluator.simple_evaluate", compare)
    evaluated(str(run), RUN, *tasks)
    assert compared


@pytest.mark.full  # lm-eval takes seconds to import and to index its tasks
def test_tasks_on_one_device_and_under_tensor_parallelism(gloo: GlooPool, run: Path, tasks: list[str]) -> None:
    alone = evaluated(str(run), RUN, *tasks)["tasks"]
    assert alone.keys() == {"titan_choice", "titan_rolling", "titan_generate"}
    assert alone["titan_rolling"]["bits_per_byte,none"] > 0
    assert 0 <= alone["titan_choice"]["acc,none"] <= 1
    first, _ = gloo.run(2, evaluated, str(run), RUN, *tasks, *TP)
    for task, metrics in alone.items():
        assert first["tasks"][task] == pytest.approx(metrics, rel=1e-4)


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([RUN], "has nothing to measure; add --dataset NAME"),
        ([RUN, "--dataset-path", "x"], "--dataset-path: needs --dataset"),
        ([RUN, "--dataset", "stdlib", "--limit", "3"], "--limit: needs --tasks"),
        ([RUN, "--dataset", "stdlob"], "stdlib"),
        ([RUN, "--dataset", "json", "--dataset-path", "missing.jsonl"], "missing.jsonl"),
        ([RUN, "--dataset", "stdlib", "--training.seq_len", "512"], "seq_len"),
        pytest.param([RUN, "--tasks", "titan_choise"], "is not a task of lm-eval", marks=pytest.mark.full),
        (["nowhere", "--dataset", "stdlib"], "nowhere"),
        (["nowhere"], "nowhere: does not exist"),
        ([RUN, "--dataset", "stdlib", "--parallelism.context_parallel_degree", "2"], "context_parallel_degree"),
    ],
)
def test_mistakes(run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(run):
        assert main(["eval", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("titan: error: ") and message in lines[-1]


@pytest.mark.full
def test_tasks_without_their_data_are_one_line(
    run: Path, tasks: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'hellaswag' on the Hub (LocalEntryNotFoundError)\nand more")

    monkeypatch.setattr("lm_eval.evaluator.simple_evaluate", offline)
    with contextlib.chdir(run):
        assert main(["eval", RUN, "--job.device", "cpu", *tasks]) == 2
    assert "the data of the tasks cannot be read: Couldn't reach 'hellaswag'" in capsys.readouterr().err


def test_lm_eval_is_optional(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("titan_inference.evaluate.find_spec", lambda name: None)
    with contextlib.chdir(run):
        assert main(["eval", RUN, "--tasks", "hellaswag"]) == 2
    (requirement,) = packages()["titan-inference"].project["optional-dependencies"]["lm-eval"]
    assert f"install it: `uv pip install '{requirement}'`" in capsys.readouterr().err
