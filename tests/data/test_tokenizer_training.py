"""`titan tokenizer train`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from harness.contexts import tokenizer_at
from titan_core.cli.main import main
from titan_data.tokenizers import bpe
from titan_data.tokenizers.hugging_face import build as build_hf

TEXT = "The quick brown fox jumps over the lazy dog. def f(x): return x + 1\nИ ещё раз, 你好 🙂🚀!\n"


TEXT_FILE = ("--training.dataset", "text", "--training.dataset_path", "corpus.txt")


def train(*more: str, size: int = 300, output: str = "out") -> int:
    Path("corpus.txt").write_text("".join(f"{number} {TEXT}" for number in range(50)))
    return main(["tokenizer", "train", "tiny", *TEXT_FILE, "--output", output, "--vocab-size", str(size), *more])


def test_a_trained_tokenizer_is_read_by_titan_and_by_transformers_files(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--special-token", "<|tool|>", size=320) == 0
    printed = capsys.readouterr().out
    assert "out: 320 tokens, trained on 1 documents" in printed
    assert '[model]\ntokenizer = "hf"\ntokenizer_path = "out"' in printed
    tokenizer = build_hf(tokenizer_at("out"))
    assert tokenizer.vocab_size == 320
    assert (tokenizer.begin_ids, tokenizer.end_ids) == ([313], [314])
    assert [tokenizer.decode([number]) for number in range(313, 320)] == [*bpe.SPECIAL_TOKENS, "<|tool|>"]
    ids = tokenizer.encode_document(TEXT + bpe.END)
    assert len(ids) < 2 * len(TEXT)
    assert ids.count(314) == 1
    assert tokenizer.decode(ids[1:-1]) == TEXT + bpe.END
    assert tokenizer.encode_with_special_tokens(f"{bpe.BEGIN}a<|tool|>") == [313, tokenizer.encode_document("a")[1], 319]
    assert sorted(path.name for path in Path("out").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("threads", ["false", "true"])
def test_the_same_text_gives_the_same_tokens_whatever_its_order(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
    lines = [f"{number * 7 % 97} {TEXT}" for number in range(400)]
    expected = bpe.train(lines, 400, bpe.SPECIAL_TOKENS).to_str()
    random.Random(0).shuffle(lines)
    assert bpe.train(iter(lines), 400, bpe.SPECIAL_TOKENS).to_str() == expected


def test_the_corpus_is_a_recipes_dataset(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["tokenizer", "train", "tiny", "--output", "a", "--vocab-size", "300", "--json", "--max-bytes", "100000"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] >= 100_000
    assert found["cut"] == ["stdlib"]
    assert found["special_tokens"][bpe.BEGIN] == 294
    Path("x.jsonl").write_text(json.dumps({"body": TEXT * 20}))
    Path("z.md").write_text(TEXT)
    more = ["--training.dataset", "json", "--training.dataset_path", "x.jsonl", "--data.text_field", "body", "--json"]
    assert main(["tokenizer", "train", "tiny", "--output", "b", "--vocab-size", "300", *more]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == 20 * len(TEXT.encode())
    untrained = ["--model.tokenizer", "hf", "--model.tokenizer_path", "c"]
    text = ["--training.dataset", "text", "--training.dataset_path", "z.md"]
    assert main(["tokenizer", "train", "tiny", "--output", "c", "--vocab-size", "264", *untrained, *text]) == 0


def test_each_dataset_of_a_mixture_gets_a_share_of_the_limit(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": name * 99 + " "}) + "\n" for _ in range(200)))
    mixture = "[{dataset = 'json', dataset_path = 'a.jsonl', name = 'a', weight = 3}, "
    mixture += "{dataset = 'json', dataset_path = 'b.jsonl', name = 'b', weight = 1}]"
    command = ["tokenizer", "train", "tiny", "--output", "out", "--vocab-size", "264", "--json", "--max-bytes", "20000"]
    assert main([*command, "--data.mixture", mixture]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 150 + 50
    assert found["cut"] == ["a", "b"]


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vocab-size", "261"), "--vocab-size 261: is less than 262, the 256 bytes and 6 special tokens"),
        (("--vocab-size", "262", "--special-token", "<x>"), "is less than 263, the 256 bytes and 7 special tokens"),
        (("--special-token", "<|eot_id|>"), "--special-token '<|eot_id|>': is a special token of every trained tokenizer"),
        (("--special-token", "<x>", "--special-token", "<x>"), "--special-token '<x>': is given twice; drop it"),
        (("--special-token", " "), "is not the name of a special token"),
        (("--special-token", "a\nb"), "is not the name of a special token"),
        (("--vocab-size", "99999"), "the corpus: is too small for 99,999 tokens: its 5,"),
        (("--training.dataset_path", "none.txt"), "none.txt"),
        (("--training.dataset_path", "empty.txt"), "empty"),
        (("--training.dataset", "json", "--training.dataset_path", "blank.jsonl"), "the corpus: contains no text; set"),
        (("--training.dataset_path", "bad.txt"), "not UTF-8 text"),
        (("--output", "corpus.txt"), "corpus.txt: is not a folder; name another one with --output"),
        (("--output", "mixed"), "is not empty (it contains a.txt); name another folder with --output, or add --force"),
        (("--output", "had"), "had: already contains a tokenizer; name another folder with --output, or add --force to"),
    ],
)
def test_a_mistake_is_one_line(
    in_tmp: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.txt").touch()
    Path("blank.jsonl").write_text('{"text": ""}\n')
    Path("bad.txt").write_bytes(b"\xff\xfe")
    for folder, names in (("mixed", ("a.txt", "b.jsonl")), ("had", ("tokenizer.json",))):
        Path(folder).mkdir()
        for name in names:
            (Path(folder) / name).touch()
    before = sorted(Path().rglob("*"))
    assert train(*arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert sorted(path for path in Path().rglob("*") if path.name != "corpus.txt") == [
        path for path in before if path.name != "corpus.txt"
    ]


def test_an_existing_tokenizer_is_replaced_as_a_whole(in_tmp: Path) -> None:
    Path("out").mkdir()
    for name in ("special_tokens_map.json", "tokenizer.model", "tokenizer.model.json", "notes.txt"):
        (Path("out") / name).write_text("of another tokenizer")
    assert train("--force") == 0
    assert {path.name for path in Path("out").iterdir()} == {"notes.txt", "tokenizer.json", "tokenizer_config.json"}
    assert build_hf(tokenizer_at("out")).vocab_size == 300


def test_a_dataset_of_tokens_is_refused(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "tokenize", "tiny", "--output", "tokens", "--workers", "1", "--parts", "1"]) == 0
    capsys.readouterr()
    more = ["--training.dataset", "tokenized", "--training.dataset_path", "tokens"]
    assert main(["tokenizer", "train", "tiny", "--output", "out", "--vocab-size", "300", *more]) == 2
    assert "contains token ids; a tokenizer is trained on text" in capsys.readouterr().err


def test_the_size_that_an_error_names_can_be_trained(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(size=5000) == 2
    size = capsys.readouterr().err.rpartition("--vocab-size ")[2]
    assert train(size=int(size)) == 0


PROGRAM = """
import contextlib, sys
from titan_core.cli.main import main
for command in (["tokenizer", "download"], ["tokenizer", "train"], ["model", "download"]):
    with contextlib.suppress(SystemExit):
        main([*command, "--help"])
heavy = {"torch", "huggingface_hub", "tokenizers", "datasets", "rich"} & sys.modules.keys()
assert not heavy, heavy
text = ["--training.dataset", "text", "--training.dataset_path", "a.txt"]
assert main(["tokenizer", "train", "tiny", *text, "--output", "out", "--vocab-size", "270"]) == 0
assert main(["tokenizer", "download", "a/b"]) == 2
assert "torch" not in sys.modules
"""


def test_the_commands_import_no_torch_and_their_help_no_library(in_tmp: Path) -> None:
    Path("a.txt").write_text(TEXT * 9)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "HF_HUB_OFFLINE is set" in done.stderr
