"""Commands that only look at a job work without the files that it needs where it trains; `titan train` does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_core.cli.main import main
from titan_testing.jobs import TINY

LOOKING = (["config", "check"], ["job", "show"], ["data", "inspect"])

MISSING: dict[str, tuple[list[str], str]] = {
    "llama3 tokenizer": (["--model.tokenizer", "llama3", "--model.tokenizer_path", "t.model"], "t.model"),
    "hf tokenizer": (["--model.tokenizer", "hf", "--model.tokenizer_path", "t/tokenizer.json"], "t/tokenizer.json"),
    "json dataset": (["--training.dataset", "json", "--training.dataset_path", "data/*.jsonl"], "data/*.jsonl"),
    "text dataset": (["--training.dataset", "text", "--training.dataset_path", "data"], "data"),
    "parquet dataset": (["--training.dataset", "parquet", "--training.dataset_path", "x.parquet"], "x.parquet"),
    "tokenized dataset": (["--training.dataset", "tokenized", "--training.dataset_path", "ids"], "ids"),
    "dataset of a mixture": (
        ["--data.mixture", '[{dataset = "json", dataset_path = "a.jsonl"}, {dataset = "stdlib"}]'], "a.jsonl",
    ),
    "validation dataset": (
        ["--validation.enable", "true", "--validation.dataset", "json", "--validation.dataset_path", "v.jsonl"], "v.jsonl",
    ),
}  # fmt: skip


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> Path:
    """The hub's client reads its environment when it is imported, so set its constants too."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return in_tmp


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(("arguments", "file"), MISSING.values(), ids=MISSING)
def test_a_missing_file_is_a_note_unless_the_job_trains(
    in_tmp: Path, arguments: list[str], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in LOOKING:
        assert main([*command, "llama3_debug", *arguments]) == 0
        (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
        assert file in note and "(needed where the job trains); " in note
        assert main([*command, "llama3_debug", *arguments, "--json"]) == 0
        assert [f"note: {line}" for line in json.loads(capsys.readouterr().out)["notes"]] == [note]
    assert main(["train", "llama3_debug", *arguments]) == 2
    error = capsys.readouterr().err
    assert file in error and error.count("\n") == 1
    assert not list(in_tmp.iterdir())


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.tokenizer", "llama3", "--model.tokenizer_path", "damaged"], "is not a line of a rank file"),
        (["--model.tokenizer", "llama3"], "needs Llama 3's tokenizer.model"),
        (["--training.dataset", "json", "--training.dataset_path", "damaged"], "not a JSON record"),
        (["--training.dataset", "jsonn"], "did you mean 'json'"),
        (["--training.dataset", "json"], "needs the path to its files"),
        (["--model.tokenizer", "hf", "--model.tokenizer_path", "x", "--training.seq_len", "9999"], "at most 2048 tokens"),
    ],
)
def test_a_mistake_stays_an_error(
    in_tmp: Path, command: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("damaged").write_text("no\n")
    assert main([*command, "llama3_debug", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_405b_recipe_can_be_looked_at_without_its_files(offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "llama3_405b", "--world-size", "512"]) == 0
    assert main(["job", "show", "llama3_405b", "--world-size", "512"]) == 0
    assert main(["data", "inspect", "llama3_405b"]) == 0
    shown = capsys.readouterr().out
    assert shown.count('note: llama3_405b: model.tokenizer_path = "assets/tokenizer/tokenizer.model": no such file') == 3
    assert "llama3 405B (406B parameters), exactly 405,853,388,800" in shown
    assert "c4, tokenizer llama3: each step reads 32 sequences of 8192 tokens" in shown
    assert "add --model.tokenizer byte --model.tokenizer_path=" in shown
    assert main(["data", "inspect", "llama3_405b", "--model.tokenizer", "byte", "--model.tokenizer_path="]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert note.startswith("note: dataset 'allenai/c4', split 'train': cannot be opened on the hub: ")


def test_a_job_that_lacks_files_cannot_train(in_tmp: Path) -> None:
    from titan_core.api import UserError
    from titan_core.api.config.resolved import Override
    from titan_core.config.load import load_config
    from titan_core.job.assemble import assemble
    from titan_core.loop.training import train
    from titan_core.plugins.registry import Components

    settings = {**TINY, "model.tokenizer": "hf", "model.tokenizer_path": "t.json"}
    overrides = [Override(key, str(value)) for key, value in settings.items()]
    job = assemble(*load_config("tiny", overrides, Components.from_installed()), missing_ok=True)
    assert job.text_tokenizer.vocab_size == job.model.layout.vocab_size
    with pytest.raises(UserError, match=r"t\.json.*no such file"):
        train(job)
    with pytest.raises(UserError, match=r"t\.json.*no such file"):
        job.text_tokenizer.encode_document("a")
