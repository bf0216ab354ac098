"""Fine-tuning a Hugging Face model on chats: the loss and the gradients are those of transformers with labels of -100 on
prompts, and the exported model stops at the end of its turn."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from harness.chat_model import CHATS, MARKED, TEMPLATE, finetuning, save_model, write_chats
from titan_core.api import Batch
from titan_core.cli.main import main
from titan_core.data.loader import data_loader
from titan_core.data.streams import OpenedData
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job, run_recipe
from titan_testing.meshes import CP, PP, TP

HEAD, EMBEDDING = "output.weight", "tok_embeddings.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a file of chats."""
    folder = tmp_path_factory.mktemp("finetuning")
    save_model(folder / "model")
    write_chats(folder / "chats.jsonl")
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are folders beside the model."""
    monkeypatch.chdir(folder)


def trained(folder: Path, changes: dict[str, object]) -> RunRecord:
    settings = finetuning(folder / "model", folder / "chats.jsonl")
    return run_recipe("llama3_debug", {**settings, **changes}, weights=True)


@pytest.fixture(scope="module")
def run(folder: Path) -> RunRecord:
    with contextlib.chdir(folder):
        return trained(folder, {"job.dump_folder": "one", "checkpoint.enable": "true"})


def first_batch(folder: Path) -> list[Batch]:
    """Return the microbatches of the first global batch."""
    job = make_job("llama3_debug", finetuning(folder / "model", folder / "chats.jsonl"))
    loader = data_loader(job, OpenedData.of(job).training, 0)
    step = loader.next_step()
    loader.close()
    assert step is not None
    return step.microbatches


def documents_of(batches: list[Batch]) -> list[list[int]]:
    """Return the ids of each document."""
    found = []
    for batch in batches:
        assert batch.documents is not None
        for tokens, targets, documents in zip(batch.tokens, batch.targets, batch.documents, strict=True):
            for document in documents.unique():
                chosen = documents == document
                if (targets[chosen] >= 0).any():
                    last = int(targets[chosen][-1])  # the last token of a full row is only a target
                    found.append([*tokens[chosen].tolist(), *([last] if last >= 0 else [])])
    return found


def test_loss_and_gradients_are_those_of_transformers_with_labels_on_the_answers(folder: Path, run: RunRecord) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    masked = {}
    for chat in CHATS:
        ids = tokenizer.apply_chat_template(chat, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True)
        masked[tuple(ids["input_ids"])] = ids["assistant_masks"]
    total, count = torch.zeros(()), 0
    for document in documents_of(first_batch(folder)):
        mask = masked[tuple(document)]
        labels = torch.tensor([token if chosen else -100 for token, chosen in zip(document, mask, strict=True)])[1:]
        logits = model(torch.tensor([document])).logits[0, :-1]
        total = total + cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        count += int((labels != -100).sum())
    (total / count).backward()
    assert run.targets[0] == count
    assert run.losses[0] == pytest.approx(total.item() / count, rel=1e-5)
    for ours, theirs in ((HEAD, model.lm_head), (EMBEDDING, model.model.embed_tokens)):
        assert theirs.weight.grad is not None
        torch.testing.assert_close(run.gradients[ours], theirs.weight.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({TP: 2}, id="TP"),
        pytest.param({PP: 2}, id="PP", marks=pytest.mark.full),
        pytest.param({"training.local_batch_size": 1}, id="FSDP", marks=pytest.mark.full),
        pytest.param({CP: 2}, id="CP", marks=pytest.mark.full),
    ],
)
def test_every_mesh_starts_from_the_weights_and_trains_the_same(
    gloo: GlooPool, folder: Path, run: RunRecord, mesh: dict[str, object]
) -> None:
    records = gloo.run(2, trained, folder, {"job.dump_folder": "/".join(mesh), **mesh})
    initial = {name: tensor for record in records for name, tensor in record.initial.items()}
    assert initial.keys() == run.initial.keys()
    for name, tensor in initial.items():
        assert torch.equal(tensor, run.initial[name]), name
    assert records[0].losses == pytest.approx(run.losses, rel=1e-5)


@pytest.fixture(scope="module")
def answers_yes(folder: Path) -> None:
    """A run, ``stops``, that has learned one answer, and its export, ``stops-hf``."""
    with contextlib.chdir(folder):
        write_chats(folder / "yes.jsonl", [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]] * 8)
        learning = {"training.steps": 25, "training.max_norm": 1.0, "optimizer.lr": 0.02, "lr_scheduler.warmup_steps": 2}
        data = {"training.dataset_path": str(folder / "yes.jsonl"), "training.seq_len": 32}
        trained(folder, {**learning, **data, "job.dump_folder": "stops", "checkpoint.enable": "true"})
        assert main(["checkpoint", "convert", "stops", "stops-hf"]) == 0


@pytest.mark.usefixtures("answers_yes")
def test_an_exported_model_stops_at_the_end_of_its_turn() -> None:
    """The template ends a turn with another token than that which ends documents, as Llama 3 does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained("stops-hf"), AutoTokenizer.from_pretrained("stops-hf")
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|end|>", "<|eot|>"])
    assert tokenizer.chat_template == TEMPLATE
    chat = [{"role": "user", "content": "?"}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**asked, max_new_tokens=30, pad_token_id=0)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "yes<|eot|>"


@pytest.mark.usefixtures("answers_yes")
def test_titan_generate_answers_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for model in ("stops", "stops-hf"):
        assert (
            main(["generate", model, "--chat", "--prompt", "?", "--temperature", "0", "--json", "--job.device", "cpu"]) == 0
        )
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert answer["text"] == "yes"


MISTAKES: dict[str, tuple[dict[str, object], str]] = {
    "no document mask": ({"data.document_mask": "false"}, "set data.document_mask = true"),
    "no template": ({"model.tokenizer": "byte", "model.tokenizer_path": ""}, "the job's tokenizer has no chat template"),
    "unknown tokenizer": ({"model.tokenizer": "bite"}, "model.tokenizer"),
    "messages without a template": ({"chat.template": "none"}, "chats.jsonl:1: has messages"),
    "too long a sequence": ({"training.seq_len": 512}, "the model accepts at most 256 tokens"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line_each(folder: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, message = MISTAKES[case]
    settings = {**finetuning(folder / "model", folder / "chats.jsonl"), **changes}
    arguments = [argument for key, value in settings.items() for argument in (f"--{key}", str(value))]
    assert main(["config", "check", "llama3_debug", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.full
def test_the_commands_of_the_page_on_finetuning(folder: Path, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/finetuning.md").read_text()
    blocks = dict(re.findall(r"<!-- test: (\S+) -->\n```\w*\n(.*?)```", page, re.DOTALL))
    shutil.copytree(folder / "model", "my-llama")
    write_chats(Path("chats.jsonl"))
    Path("sft.toml").write_text(blocks["sft.toml"].replace("steps = 20", "steps = 2"))
    commands = [shlex.split(line) for line in blocks["commands"].splitlines()]
    assert len(commands) == 5
    for program, *arguments in commands:
        assert program == "titan"
        device = [] if arguments[0] == "checkpoint" else ["--job.device", "cpu"]
        assert main([*arguments, *device]) == 0
    printed = capsys.readouterr().out
    assert "loss on" in printed and "wrote exported" in printed
    assert Path("exported/chat_template.jinja").is_file()
