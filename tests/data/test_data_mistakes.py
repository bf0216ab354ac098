"""Every mistake in a data config is one clear line: what, where, why, and a fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_core.api import UserError
from titan_core.cli.main import main
from titan_core.data.streams import OpenedData
from titan_testing.jobs import make_job

GOOD = [{"text": f"document {number}"} for number in range(20)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(record) + "\n" for record in GOOD))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "a" * 2000}) + "\n")
    (tmp_path / "blank.jsonl").write_text("\n  \n")
    (tmp_path / "deep.jsonl").write_text('{"text": "a", "unused": ' + "[" * 3000 + "]" * 3000 + "}\n")
    (tmp_path / "bad.txt").write_bytes(b"good\n" * 9000 + b"\xff\n")
    return tmp_path


def json_at(path: str, **more: object) -> dict[str, object]:
    return {"training.dataset": "json", "training.dataset_path": path, **more}


def validated(**more: str) -> dict[str, object]:
    return {"validation.enable": "true", "validation.dataset": "json"} | {f"validation.{key}": more[key] for key in more}


def mixed(*datasets: str) -> dict[str, object]:
    return {"data.mixture": f"[{', '.join(f'{{{dataset}}}' for dataset in datasets)}]"}


NESTED = "deep.jsonl:1: not a JSON record: its lists and objects are nested too deeply; each line must be one JSON object"
MISTAKES: dict[str, tuple[dict[str, object], str]] = {
    "no such file": (json_at("none.jsonl"), 'training.dataset_path = "none.jsonl": no such file; check the path (a file,'),
    "empty": (json_at("empty.jsonl"), 'training.dataset_path = "empty.jsonl": the dataset is empty'),
    "blank": (json_at("blank.jsonl"), 'training.dataset_path = "blank.jsonl": the dataset is empty'),
    "no field": (
        json_at("good.jsonl", **{"data.text_field": "body"}),
        "good.jsonl:1: no field 'body' (fields: text); set data.text_field, or data.format",
    ),
    "a long first line": (
        json_at("long.jsonl", **{"data.max_record_bytes": 1024}),
        "long.jsonl:1: the line takes 2,013 bytes, more than data.max_record_bytes = 1024 allows; set "
        "data.max_record_bytes = 2013",
    ),
    "nesting": (json_at("deep.jsonl"), NESTED),
    "nesting beside token ids": ({"training.dataset": "input_ids", "training.dataset_path": "deep.jsonl"}, NESTED),
    "a function": (
        json_at("good.jsonl", **{"data.format": "os:system"}),
        'command line: data.format = "os:system": names code, and a recipe runs none but that of plugins; register the '
        "function as a format in a file, and start `titan --plugin FILE ...`; or a template of fields looks "
        'like "{{ question }} {{ answer }}"',
    ),
    "a function in a mixture": (
        mixed("dataset = 'json', dataset_path = 'good.jsonl', format = 'harness.formats:joined'"),
        'data.mixture[0].format = "harness.formats:joined": names code',
    ),
    "a function for validation": (
        validated(dataset_path="good.jsonl", format="os:system"),
        'validation.format = "os:system": names code',
    ),
    "no such format": (
        json_at("good.jsonl", **{"data.format": "joinde"}),
        "data.format = \"joinde\": no installed plugin provides this format; did you mean 'joined'?; a template of fields",
    ),
    "not a template": (json_at("good.jsonl", **{"data.format": "{{ text"}), "data.format = '{{ text': is not a template: "),
    "a template of another field": (
        json_at("good.jsonl", **{"data.format": "{{ txet }}"}),
        "good.jsonl:1: data.format: 'txet' is undefined in the record (fields: text); correct the template",
    ),
    "no path": ({"training.dataset": "tokenized"}, "'tokenized' needs the path to its folder; set training.dataset_path"),
    "not tokenised": (
        {"training.dataset": "tokenized", "training.dataset_path": "."},
        "not a complete tokenised dataset: tokenized.json: No such file or directory; run `titan data tokenize`",
    ),
    "all zero": (mixed("dataset = 'stdlib', weight = 0.0"), 'data.mixture = [{dataset = "stdlib"'),
    "negative": (mixed("dataset = 'stdlib', weight = -1.0"), "data.mixture[0].weight = -1.0: must be at least 0"),
    "one name": (mixed("dataset = 'stdlib'", "dataset = 'stdlib'"), "two datasets are named 'stdlib'; give each a"),
    "unknown": (
        mixed("dataset = 'stdlib'", "dataset = 'jsn'"),
        "data.mixture[1].dataset = \"jsn\": no installed plugin provides this dataset; did you mean 'json'?",
    ),
    "a path beside a mixture": (
        mixed("dataset = 'stdlib'") | {"training.dataset_path": "good.jsonl"},
        'training.dataset_path = "good.jsonl": conflicts with data.mixture, in which each dataset has its own path',
    ),
    "validation": (validated(dataset_path="none.jsonl"), 'validation.dataset_path = "none.jsonl": no such file'),
    "vocabulary": ({"model.args.vocab_size": "200"}, "258 tokens, but the model's has only 200; choose another tokenizer"),
}


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported_before_anything_is_built(folder: Path, mistake: str) -> None:
    settings, message = MISTAKES[mistake]
    with pytest.raises(UserError) as caught:
        make_job("tiny", dict(settings))
    assert message in str(caught.value)


def test_several_mistakes_are_reported_at_once(folder: Path) -> None:
    first, second = (f"dataset = 'json', dataset_path = '{name}.jsonl', name = '{name}'" for name in ("none", "empty"))
    with pytest.raises(UserError) as caught:
        make_job("tiny", mixed(first, second))
    assert len(caught.value.problems) == 2


def test_too_few_documents(folder: Path) -> None:
    job = make_job("tiny", json_at("good.jsonl", **{"training.global_batch_size": "32"}))
    with pytest.raises(UserError, match="dataset 'json': has 20 documents, fewer than the 32 logical shards"):
        OpenedData.of(job)


def test_undecodable_bytes_end_the_command_with_one_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = {
        "training.dataset": "text", "training.dataset_path": "bad.txt", "training.global_batch_size": "1",
        "training.local_batch_size": "1", "training.steps": "500", "training.seq_len": "256",
        "model.args": "{dim = 16, n_layers = 1, n_heads = 1, n_kv_heads = 1, ffn_dim = 16}", "job.device": "cpu",
    }  # fmt: skip
    arguments = ["train", "tiny", *(part for key, value in settings.items() for part in (f"--{key}", value))]
    assert main(arguments) == 2
    err = capfd.readouterr().err
    assert "bad.txt: not UTF-8 text: invalid start byte at byte 45000; convert the file to UTF-8, or s" in err
    assert "Traceback" not in err


def test_data_inspect_shows_documents_and_shares(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mixture = "[{dataset = 'json', dataset_path = 'good.jsonl', weight = 3.0}, {dataset = 'stdlib', name = 'code'}]"
    arguments = ["data", "inspect", "tiny", "--sequences", "16", "--data.mixture", mixture, "--data.document_mask", "true"]
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["shares"]["json"] == pytest.approx(0.75, abs=1 / 16)  # of 16 sequences
    assert len({sequence["dataset"] for sequence in shown["sequences"]}) == 2
    from_json = [sequence for sequence in shown["sequences"] if sequence["dataset"] == "json"]
    assert bytes(from_json[0]["pieces"][0][1:-1]).decode().startswith("document ")
    assert {len(piece) for sequence in from_json for piece in sequence["pieces"][:-1]} <= {12, 13}
    assert shown["packed"]["packing"] == "concatenate" and shown["packed"]["padding"] == 0 < shown["packed"]["cut"] < 1
    assert main([*arguments, "--data.packing", "best_fit", "--data.packing_window", "8"]) == 0
    out = capfd.readouterr().out
    assert "packing best_fit: " in out and "documents are cut, and " in out and "] padding" in out
    assert main(arguments) == 0
    out = capfd.readouterr().out
    line = "257 tokens of 'json', pieces of 21 documents, attention within each document"
    assert line in out or "pieces of 20 documents" in out
    assert "<|begin_of_text|>document " in out
    assert "json     0.7500" in out
