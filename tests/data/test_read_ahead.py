"""Datasets announce the bytes of blocks of documents, exactly those of the documents: to the kernel, or to the reader of a
store. What they announce is what an order is said to cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from harness.kinds_of_data import BOOK, FOREIGN, IDS, KINDS, RAW, TEXTS, foreign, table_text
from titan_core.api import DatasetContext
from titan_data.foreign import flat_tokens
from titan_data.json_lines import JsonRecords
from titan_data.mapped_files import MappedFiles
from titan_data.read_cost import read_costs
from titan_data.tokenized import MappedTokens, Part, TokenizedIndex, open_tokenized
from titan_testing.jobs import make_job


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    found = []
    read_ahead = MappedFiles.read_ahead

    def noted(self: Any, file: Path, first: int, last: int) -> None:
        found.append((file.name, first, last))
        read_ahead(self, file, first, last)

    monkeypatch.setattr(MappedFiles, "read_ahead", noted)
    return found


def test_of_token_ids(tmp_path: Path, announced: list[tuple[str, int, int]]) -> None:
    lengths = {"a": [3, 0, 5], "b": [2, 2]}
    for name, of_part in lengths.items():
        numpy.arange(sum(of_part), dtype="<u2").tofile(tmp_path / f"{name}.bin")
        numpy.cumsum(of_part).astype("<i8").tofile(tmp_path / f"{name}.idx")
    index = TokenizedIndex("<u2", "byte", "", tuple(Part(name, len(one), sum(one)) for name, one in lengths.items()))
    documents = MappedTokens(tmp_path, index)
    documents.read_ahead(0, 5)
    documents.read_ahead(1, 3)
    documents.read_ahead(2, 4)
    documents.read_ahead(4, 4)
    assert announced == [("a.bin", 0, 16), ("b.bin", 0, 8), ("a.bin", 6, 16), ("a.bin", 6, 16), ("b.bin", 0, 4)]
    index.write(tmp_path)
    announced.clear()
    context = DatasetContext("tokenized", str(tmp_path), "text", 3, "here", section=None, shuffle="blocks")
    source = open_tokenized(context)
    assert sorted(len(document) for document in source.shard(0, 1, 0)) == [0, 2, 2, 3, 5]  # type: ignore[arg-type]
    assert sorted(announced) == [("a.bin", 0, 6), ("a.bin", 6, 6), ("a.bin", 6, 16), ("b.bin", 0, 4), ("b.bin", 4, 8)]


def test_of_json_lines(tmp_path: Path, announced: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    lines = [json.dumps({"text": "x" * length}) + "\n" for length in (5, 1, 9, 2)]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text("".join(lines[:3]))
    files[1].write_text(lines[3])
    documents = JsonRecords(files, files, lambda record, place: str(record["text"]))
    documents.read_ahead(0, 4)
    documents.read_ahead(1, 2)
    sizes = [len(line) for line in lines]
    assert announced[:2] == [("a.jsonl", 0, sum(sizes[:3])), ("b.jsonl", 0, sizes[3])]
    assert announced[2] == ("a.jsonl", sizes[0], sizes[0] + sizes[1])


def values_of(table: str, records: int) -> int:
    """Return the bytes of a CSV file without those of its header and of line ends."""
    return len(table.encode()) - len(table.partition("\n")[0]) - 1 - 2 * records


def samples_of(folder: Path) -> int:
    """Return the bytes of the samples of MDS: what follows the header, whose second number is the first sample's place."""
    return sum(file.stat().st_size - int(numpy.fromfile(file, "<u4", 2)[1]) for file in folder.glob("*.mds"))


TOKENS = sum(map(len, IDS))
USEFUL: dict[str, int] = {
    "JSON lines": len(RAW),
    "CSV": values_of(table_text([{"text": text, "n": "1"} for text in TEXTS], ","), len(TEXTS)),
    "a book": len(BOOK.encode()),
    "`titan data tokenize`": 2 * TOKENS,
    "Megatron-LM": 2 * TOKENS,
    "Megatron-LM, documents of several sequences": 4 * TOKENS,
    "MosaicML's streaming (MDS)": samples_of(FOREIGN / "mds_int32"),
    "datatrove, nanotron": 2 * TOKENS,
    "datatrove with losses": (4 + 1) * TOKENS,
    "nanoGPT": 2 * TOKENS,
    "`numpy.save`": 2 * TOKENS,
}
MORE = {
    "Megatron-LM, documents of several sequences": foreign("megatron", "megatron_int32"),
    "datatrove with losses": foreign("datatrove", "datatrove_uint32.ds"),
}


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("kind", "flat_index"), [*((kind, 1 << 24) for kind in USEFUL), ("nanoGPT", 0), ("`numpy.save`", 0)]
)
def test_what_is_announced_is_what_an_order_costs(
    kind: str, flat_index: int, in_tmp: Path, announced: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``flat_index``: the largest flat dataset whose documents are all located when it is opened."""
    monkeypatch.setattr(flat_tokens, "INDEXED", flat_index)
    settings = {**(KINDS | MORE)[kind](in_tmp), "data.shuffle": "blocks", "training.global_batch_size": 8}
    job = make_job("tiny", {**settings, "training.local_batch_size": 8})
    (cost,) = read_costs(job).values()
    assert cost.useful == USEFUL[kind] and cost.requests > 0
    (dataset,) = job.data.datasets
    assert len(list(dataset.build.load()(dataset.context).shard(0, 1, 0))) > 0
    assert sum(last - first for _, first, last in announced) == USEFUL[kind]
