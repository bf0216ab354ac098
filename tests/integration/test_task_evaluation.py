"""Tasks of lm-eval while a model trains: the scores of lm-eval's own model on the exported weights, on any mesh, and the
same training to the bit as without them."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, run_recipe
from harness.meshes import CP, DR, PP, TP
from harness.quick import rows
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_core.toolkit.runs.run_log import RunLog

pytestmark = pytest.mark.full  # lm-eval takes seconds to import and to index its tasks
SETTINGS: dict[str, object] = {
    "model.args": "{dim = 48, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 96, max_seq_len = 64}",
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "training.deterministic": "true",
    "lr_scheduler.warmup_steps": 1,
    "optimizer.lr": 0.01,
    "checkpoint.enable": "true",
    "job.device": "cpu",
}
ON: dict[str, object] = {
    "evaluation.enable": "true",
    "evaluation.tasks": '["titan_choice", "titan_rolling"]',
    "evaluation.freq": 2,
    "evaluation.include_path": "tasks",
}
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP 2": (2, {}),
    "DDP 2": (2, {DR: 2}),
    "TP 2": (2, {TP: 2}),
    "CP 2": (2, {CP: 2}),
    "PP 2": (2, {PP: 2}),
    "TP 2 x PP 2": (4, {TP: 2, PP: 2}),
    "CP 2, document mask": (2, {CP: 2, "data.document_mask": "true"}),
}
RUN = Path("outputs/llama3_debug")


def write_tasks(folder: Path) -> None:
    """Write tasks that need no network: multiple choice, perplexity of whole texts, generation, and one without its data."""
    tasks = folder / "tasks"
    tasks.mkdir()
    questions = [
        {"question": f"{n} plus {n} is", "choices": [str(n), str(2 * n), "many"], "answer": n % 3} for n in range(1, 12)
    ]
    (tasks / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))

    def write(name: str, data: Path, more: str) -> None:
        files = f'dataset_kwargs: {{data_files: {{test: "{data}"}}}}'
        (tasks / f"{name}.yaml").write_text(f"task: titan_{name}\ndataset_path: json\n{files}\ntest_split: test\n{more}")

    data = tasks / "questions.jsonl"
    write(
        "choice",
        data,
        """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    )
    write(
        "rolling",
        data,
        """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question * 12}}"
metric_list: [{metric: bits_per_byte}]
""",
    )
    write(
        "generate",
        data,
        """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[1]}}"
generation_kwargs: {until: ["."], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    )
    write("absent", tasks / "absent.jsonl", """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
""")  # fmt: skip


def trained(folder: str, settings: dict[str, object]) -> RunRecord:
    os.chdir(folder)
    return run_recipe("llama3_debug", {**SETTINGS, **settings}, weights=True)


def scores(folder: Path) -> dict[int, dict[str, float]]:
    """Return the scores that the run logged, by step."""
    records = [
        record for record in RunLog.read_metrics(folder / RUN) if any(key.startswith("evaluation/") for key in record)
    ]
    found: dict[int, dict[str, float]] = {}
    for record in records:
        named = {key.removeprefix("evaluation/"): value for key, value in record.items() if key.startswith("evaluation/")}
        found.setdefault(record["step"], {}).update(named)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, gloo: GlooPool) -> RunRecord:
    """The run on one device without tasks."""
    return gloo.run(1, trained, str(tmp_path_factory.mktemp("plain")), {})[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, gloo: GlooPool) -> tuple[Path, RunRecord]:
    """The run on one device with tasks."""
    folder = tmp_path_factory.mktemp("alone")
    write_tasks(folder)
    return folder, gloo.run(1, trained, str(folder), ON)[0]


def test_training_is_the_same_to_the_bit(alone: tuple[Path, RunRecord], plain: RunRecord) -> None:
    assert alone[1].losses == plain.losses
    assert all(tensor.equal(plain.final[name]) for name, tensor in alone[1].final.items())
    assert list(scores(alone[0])) == [0, 2, 4]


def model_of_transformers(folder: Path) -> Any:
    """Return the exported model behind lm-eval's interface: transformers computes one row at a time."""
    from lm_eval.api.model import TemplateLM
    from transformers import AutoTokenizer, LlamaForCausalLM

    class Exported(TemplateLM):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
            self.tokenizer_of = AutoTokenizer.from_pretrained(folder)

        @property
        def eot_token_id(self) -> int:
            return 257

        prefix_token_id = 256

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            ids = self.tokenizer_of(string, add_special_tokens=False)["input_ids"]
            return ids if add_special_tokens is False else [256, *ids]

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [self.score(context, continuation) for _, context, continuation in requests]

        def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
            row = torch.tensor([[*context, *continuation][-65:]])
            with torch.no_grad():
                scores = self.model(row[:, :-1]).logits[0].log_softmax(-1)[-len(continuation) :]
            wanted = row[0, -len(continuation) :]
            return float(scores.gather(-1, wanted[:, None]).sum()), bool((scores.argmax(-1) == wanted).all())

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            found = []
            for request in requests:
                ids = [256, *self.tok_encode(request.args[0], add_special_tokens=False)]
                windows = [ids[max(0, end - 65) : end] for end in range(65, len(ids), 64)] + [ids[-65:]]
                done, total = 1, 0.0
                for number, window in enumerate(windows):
                    end = min(len(ids), 65 + 64 * number)
                    total += self.score(window[: len(window) - (end - done)], window[len(window) - (end - done) :])[0]
                    done = end
                found.append(total)
            return found

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            raise NotImplementedError("no task here generates")

    return Exported()


def test_scores_are_those_of_lm_eval_on_the_exported_model(alone: tuple[Path, RunRecord]) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from titan_inference.tasks import scores_in

    folder = alone[0]
    with contextlib.chdir(folder):
        assert main(["checkpoint", "convert", str(RUN / "checkpoint/step-4"), "hf"]) == 0
        model, manager = model_of_transformers(folder / "hf"), TaskManager(include_path="tasks", include_defaults=False)
        for task in ("titan_choice", "titan_rolling"):
            results: Any = simple_evaluate(model, tasks=[task], task_manager=manager, log_samples=False)
            found = scores_in(results)
            assert found
            for name, value in found.items():
                assert f"{value:.5f}" == f"{scores(folder)[4][f'{task}/{name}']:.5f}"


@pytest.mark.parametrize("name", rows(MESHES, ["CP 2", "TP 2 x PP 2", "CP 2, document mask"]))
def test_scores_on_a_mesh(gloo: GlooPool, tmp_path: Path, alone: tuple[Path, RunRecord], name: str) -> None:
    write_tasks(tmp_path)
    ranks, mesh = MESHES[name]
    record = gloo.run(ranks, trained, str(tmp_path), {**ON, **mesh})[0]
    if "document" not in name:
        assert record.losses == pytest.approx(alone[1].losses, rel=1e-5)
        found, wanted = scores(tmp_path), scores(alone[0])
        assert found.keys() == wanted.keys()
        for step, values in wanted.items():
            assert found[step] == pytest.approx(values, rel=1e-4)
    tmp_plain = tmp_path / "plain"
    tmp_plain.mkdir()
    assert gloo.run(ranks, trained, str(tmp_plain), mesh)[0].losses == record.losses


def test_a_task_that_fails_ends_nothing(gloo: GlooPool, tmp_path: Path, plain: RunRecord) -> None:
    """One whose data is missing, and one that generates text where layers are divided; the others still run."""
    write_tasks(tmp_path)
    tasks = '["titan_absent", "titan_generate", "titan_choice"]'
    record = gloo.run(2, trained, str(tmp_path), {**ON, PP: 2, "evaluation.tasks": tasks})[0]
    assert record.losses == pytest.approx(plain.losses, rel=1e-5)
    assert {key.partition("/")[0] for key in scores(tmp_path)[4]} == {"titan_choice"}


def test_the_final_tasks_have_all_of_their_questions(gloo: GlooPool, tmp_path: Path, alone: tuple[Path, RunRecord]) -> None:
    write_tasks(tmp_path)
    more = {"evaluation.limit": 2, "evaluation.final_tasks": '["titan_choice", "titan_generate"]', "evaluation.freq": 0}
    gloo.run(2, trained, str(tmp_path), {**ON, **more, TP: 2})
    found = scores(tmp_path)
    assert list(found) == [0, 4] and "titan_generate/exact_match" in found[4]
    assert found[4]["titan_choice/acc"] == pytest.approx(scores(alone[0])[4]["titan_choice/acc"])
    assert found[0]["titan_choice/acc"] in (0, 0.5, 1)


MISTAKES: dict[str, tuple[dict[str, object], str]] = {
    "none": ({"evaluation.tasks": "[]"}, "names no task"),
    "unknown": ({"evaluation.tasks": '["titan_choise"]'}, "is not a task of lm-eval; did you mean 'titan_choice'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(in_tmp: Path, name: str) -> None:
    write_tasks(in_tmp)
    settings, says = MISTAKES[name]
    with pytest.raises(UserError, match=says):
        trained(str(in_tmp), {**ON, **settings})
