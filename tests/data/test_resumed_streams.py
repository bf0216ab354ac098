"""Every kind of dataset is resumed twice as if the run had not stopped; a library that loses its place is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.chat_model import save_tokenizer, write_chats
from harness.fake_hub import folders_for_the_hub
from harness.letters import BYTE, letters, stream
from harness.loaders import close, global_batch, merged, plan
from titan_core.api import DatasetContext, Ref, TokenizerContext, UserError
from titan_core.api.data.dataset import DatasetSpec, StreamSpec
from titan_core.api.data.tokenizer import TokenizerSpec
from titan_core.data.loader import DataLoader
from titan_core.data.streams import open_sources
from titan_data.chat.config import ChatSection
from titan_data.engines import LocalEngine
from titan_data.huggingface import StreamedDocuments
from titan_data.records import reads_text
from titan_data.tokenize import tokenize

LONGEST = 63
"""Length of sequences that fits all chats."""
TEXTS = [f"document {number} " + "of words " * (number * 7 % 5) for number in range(48)]
BROKEN = "5.0.0"
"""The version of datasets whose position stays at zero after a resume."""


def write_files(folder: Path, form: str) -> None:
    """Write :data:`TEXTS` to two files of one form."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    for number, texts in enumerate((TEXTS[:20], TEXTS[20:])):
        file = folder / f"train-{number}.{'jsonl' if form == 'json' else form}"
        if form == "json":
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        elif form == "csv":
            file.write_text("text\n" + "".join(f"{text}\n" for text in texts))
        elif form == "text":
            file.with_suffix(".txt").write_text("".join(f"{text}\n" for text in texts))
        elif form == "arrow":
            with pyarrow.ipc.new_stream(str(file), pyarrow.schema([("text", pyarrow.string())])) as writer:
                writer.write_table(pyarrow.table({"text": texts}))
        else:
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=5)


def context(name: str, path: Path | None, **more: Any) -> DatasetContext[Any]:
    return DatasetContext(name, None if path is None else str(path), "text", 0, "recipe", **{"section": None, **more})


def made(kind: str, folder: Path) -> DatasetSpec:
    """Return a dataset of ``kind``, whose files it writes."""
    if kind == "stdlib":
        return DatasetSpec(kind, 1.0, Ref("titan_core.data.stdlib:open_stdlib"), context(kind, None))
    if kind == "tokenized":
        source = stream(letters(",".join(str(3 + number * 7 % 40) for number in range(40))), plan=plan(1))
        list(tokenize(source, source.datasets[0], "byte", folder / "tokens", 2, LocalEngine(1)))
        return DatasetSpec(kind, 1.0, Ref("titan_data.tokenized:open_tokenized"), context(kind, folder / "tokens"))
    if kind == "chat":
        save_tokenizer(folder)
        write_chats(folder / "chats.jsonl", CHATS)
        spec = TokenizerSpec(
            Ref[Any]("titan_data.tokenizers.hugging_face:build"), TokenizerContext(section=None, path=str(folder))
        )
        chats = context(kind, folder / "chats.jsonl", section=ChatSection(), tokenizer_spec=spec, seq_len=LONGEST)
        return DatasetSpec(kind, 1.0, Ref("titan_data.chat.source:open_chats"), chats)
    kind, _, form = kind.partition(" ")
    write_files(folder / "files", form or kind)
    opener = {"text": "titan_data.text_files:open_text", "hub": "titan_data.huggingface:open_hub"}
    build: Ref[Any] = Ref(opener.get(kind, "titan_data.record_files:open_local"))
    return DatasetSpec(kind, 1.0, build, context(kind, folder / "files"))


CHATS = [
    [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "answer " * (number % 4 + 1)}]
    for number in range(24)
]
KINDS = ("stdlib", "json", "parquet", "arrow", "tokenized", "chat", "hub json", "hub parquet", "hub csv", "hub text")


def loader_of(spec: StreamSpec) -> list[DataLoader]:
    chat = spec.datasets[0].context.tokenizer_spec
    return [DataLoader(spec, open_sources(spec), BYTE if chat is None else chat.open(), 0)]


def resumed(spec: StreamSpec, state: Any, steps: int) -> tuple[list[Any], Any]:
    other = loader_of(spec)
    other[0].load_state_dict(state)
    try:
        return [global_batch(other) for _ in range(steps)], merged(other)
    finally:
        close(other)


def shape(kind: str) -> Any:
    return plan(1, global_size=4, shards=2 if kind == "hub text" else 4, seq_len=LONGEST if kind == "chat" else 39)


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("kind", KINDS)
@folders_for_the_hub()
def test_every_kind_of_dataset_is_resumed_twice(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    spec = stream(made(kind, tmp_path), plan=shape(kind))
    if kind == "hub parquet":
        spec = replace(spec, shuffle_buffer=4)
    whole = loader_of(spec)
    expected = [global_batch(whole) for _ in range(9)]
    close(whole)
    for stop in (1, 4):
        first = loader_of(spec)
        assert [global_batch(first) for _ in range(stop)] == expected[:stop]
        state = merged(first)
        close(first)
        once, state = resumed(spec, state, 2)
        assert once == expected[stop : stop + 2]
        twice, state = resumed(spec, state, 1)
        assert twice == expected[stop + 2 : stop + 3]
        thrice, _ = resumed(spec, state, 1)
        assert thrice == expected[stop + 3 : stop + 4]


class Stub:
    """An ``IterableDataset`` of one file whose position stays at zero after it was restored, as that of datasets 5.0.0."""

    num_shards = 1

    def __init__(self, moves: bool) -> None:
        self.moves, self.start, self.at, self.restored = moves, 0, 0, False

    def shard(self, num_shards: int, index: int) -> Stub:
        return Stub(self.moves)

    def __iter__(self) -> Any:
        for at in range(self.start, len(TEXTS)):
            self.at = at + 1
            yield {"text": TEXTS[at]}

    def state_dict(self) -> Any:
        frozen = self.restored and not self.moves
        return {"example": self.at - (self.start if self.restored else 0) if not frozen else 0}

    def load_state_dict(self, state: Any) -> None:
        self.start = self.at = state["example"]
        self.restored = True


@pytest.mark.parametrize("moves", [False, True])
def test_a_library_that_loses_its_place_is_refused(moves: bool) -> None:
    """At once if its position does not move, and otherwise when it is resumed again."""
    asked = context("hub", None)
    spec = stream(DatasetSpec("hub", 1.0, Ref("nowhere:open"), asked), plan=plan(1, global_size=1, shards=1, seq_len=39))

    def loader() -> DataLoader:
        return DataLoader(spec, [StreamedDocuments(Stub(moves), asked, reads_text(asked))], BYTE, 0)

    first, second, third = loader(), loader(), loader()
    for _ in range(9):
        assert first.next_step() is not None
    second.load_state_dict(merged([first]))
    if moves:
        for _ in range(9):
            assert second.next_step() is not None
        third.load_state_dict(merged([second]))
    refusal = "data position mismatch" if moves else "the position that datasets .* reports does not move"
    with pytest.raises(UserError, match=f"dataset 'hub'.*: .*{refusal}"):
        list(iter((third if moves else second).next_step, None))
    close([first, second, third])


@pytest.mark.wheels
@pytest.mark.full
@pytest.mark.parametrize("version", [BROKEN, "5.0.1"])
def test_other_versions_of_datasets(tmp_path: Path, version: str) -> None:
    """The version that loses its place is refused before a step is trained; the next one resumes twice."""
    target = tmp_path / "installed"
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--target", str(target), f"datasets=={version}"]
    subprocess.run(install, check=True)
    code = f"import test_resumed_streams as test, pathlib; test.in_another_version({str(tmp_path)!r})"
    paths = [str(target), str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == version
    if version == BROKEN:
        why = f"after a resume, the position that datasets {BROKEN} reports does not move"
        assert lines[1].startswith(f"dataset '{tmp_path}/files': {why}")
        assert "data position mismatch" in lines[2]  # by the stream check, without the library's own check
    else:
        assert lines[1:] == ["resumed", "resumed"]


@folders_for_the_hub()
def in_another_version(folder: str) -> None:
    """Resume a stream twice, and print how that ends: with the check of the library's own position, and without."""
    import datasets

    from titan_data import huggingface

    print(datasets.__version__)
    spec = stream(made("hub json", Path(folder)), plan=shape("hub json"))
    for check in (huggingface._StreamShard._require_progress, lambda shard: None):
        huggingface._StreamShard._require_progress = check  # type: ignore[method-assign]
        first = loader_of(spec)
        for _ in range(6):  # an epoch has nine
            global_batch(first)
        state = merged(first)
        try:
            for _ in range(2):
                _, state = resumed(spec, state, 3)
            print("resumed")
        except UserError as error:
            print(str(error).replace("\n", " "))
        close(first)
