"""Token ids that other tools wrote are read as they are.

The files in ``tests/data/foreign`` were written by the libraries whose formats they have (``write.py`` there). nanoGPT, OLMo
and llm.c have no library: their files are written here after their scripts (nanoGPT ``data/openwebtext/prepare.py``, OLMo
``scripts/prepare_memmap_dataset.py``, llm.c ``dev/data/data_common.py``)."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy
import pytest

from harness.foreign_tokens import END, HEADER, UINT16, context, ids_of, llm_c, problems
from harness.kinds_of_data import FOREIGN, IDS, TEXTS
from titan_core.api import CorruptRecord, UserError, WeightedTokens
from titan_core.cli.main import main
from titan_data.foreign import flat_tokens
from titan_data.foreign.config import FlatTokensSection, MdsSection
from titan_data.foreign.formats import describe_tokens, open_tokens
from titan_testing.jobs import make_job

pytestmark = pytest.mark.usefixtures("cache_folder")


def nanogpt(folder: Path) -> Path:
    numpy.array([*chain.from_iterable(IDS)], numpy.uint16).tofile(folder / "train.bin")
    return folder / "train.bin"


def olmo(folder: Path) -> Path:
    ids = numpy.array([*chain.from_iterable(IDS)], numpy.uint16)
    part = numpy.memmap(folder / "part-0.npy", numpy.uint16, mode="w+", shape=ids.shape)
    part[:] = ids
    part.flush()
    return folder


def saved(folder: Path) -> Path:
    numpy.save(folder / "tokens.npy", numpy.array([*chain.from_iterable(IDS)], numpy.int64))
    return folder / "tokens.npy"


def llama_3(folder: Path) -> Path:
    return llm_c(folder, 20240801, 7, numpy.uint32)


READ: dict[str, tuple[str, Path | Callable[[Path], Path], Any]] = {
    "megatron, uint16": ("megatron", FOREIGN / "megatron_uint16", None),
    "megatron, int32, documents of several sequences": ("megatron", FOREIGN / "megatron_int32", None),
    "megatron, with its ending": ("megatron", FOREIGN / "megatron_uint16.bin", None),
    "megatron, a glob": ("megatron", FOREIGN / "megatron_u*", None),
    "mds, int32": ("mds", FOREIGN / "mds_int32", MdsSection()),
    "mds, any type": ("mds", FOREIGN / "mds_any", MdsSection()),
    "mds, bytes": ("mds", FOREIGN / "mds_bytes" / "index.json", MdsSection(dtype="int64")),
    "mds, zstd": ("mds", FOREIGN / "mds_zstd", MdsSection()),
    "mds, gz": ("mds", FOREIGN / "mds_gz", MdsSection()),
    "datatrove, uint16": ("datatrove", FOREIGN / "datatrove_uint16.ds", None),
    "datatrove, uint32 with losses": ("datatrove", FOREIGN / "datatrove_uint32.ds", None),
    "nanoGPT": ("flat_tokens", nanogpt, UINT16),
    "OLMo": ("flat_tokens", olmo, UINT16),
    "numpy.save": ("flat_tokens", saved, HEADER),
    "llm.c, GPT-2": ("flat_tokens", llm_c, HEADER),
    "llm.c, Llama 3": ("flat_tokens", llama_3, HEADER),
}


@pytest.fixture(params=[1 << 24, 0], ids=["documents", "pieces"])
def flat_index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest flat dataset whose documents are all located when it is opened."""
    monkeypatch.setattr(flat_tokens, "INDEXED", request.param)


@pytest.mark.quick_rows(5)
@pytest.mark.usefixtures("flat_index")
@pytest.mark.parametrize("kind", READ)
def test_documents_are_those_that_were_written(kind: str, tmp_path: Path) -> None:
    name, path, section = READ[kind]
    asked = context(name, path(tmp_path) if callable(path) else path, section)
    assert problems(asked) == []
    source = open_tokens(asked)
    for count in (1, 3):
        found = [document for index in range(count) for document in source.shard(index, count, 0)]
        assert sorted(map(ids_of, found)) == sorted(IDS)
        for document in found:
            if isinstance(document, WeightedTokens):
                assert document.weights.tolist() == [0, 0, 0] + [1] * (len(document.ids) - 3)
    assert source.fingerprint["bytes"] > 0
    lines = describe_tokens(asked)
    assert any("do not record their tokenizer" in line for line in lines)


@pytest.mark.quick_rows(5)
@pytest.mark.usefixtures("flat_index")
@pytest.mark.parametrize("kind", READ)
def test_reading_resumes_after_any_document(kind: str, tmp_path: Path) -> None:
    name, path, section = READ[kind]
    source = open_tokens(context(name, path(tmp_path) if callable(path) else path, section))
    whole = [ids_of(document) for document in source.shard(0, 2, 1)]
    for done in range(len(whole) + 1):
        shard = source.shard(0, 2, 1)
        first = [ids_of(document) for document in islice(shard, done)]
        other = source.shard(0, 2, 1)
        other.load_state_dict(json.loads(json.dumps(shard.state_dict())))
        third = source.shard(0, 2, 1)
        third.load_state_dict(json.loads(json.dumps(other.state_dict())))  # saved again before any document was read
        assert [*first, *map(ids_of, other)] == whole
        assert [*first, *map(ids_of, third)] == whole


@pytest.mark.usefixtures("flat_index")
def test_pieces_have_each_document_once_wherever_they_are_cut(tmp_path: Path) -> None:
    random = numpy.random.default_rng(0)
    documents = [[*random.integers(0, 200, int(length)).tolist(), END] for length in random.integers(0, 400, 300)]
    documents[7] = [*range(200)] * 30 + [END]  # longer than some pieces
    numpy.array([*chain.from_iterable(documents)], numpy.uint16).tofile(tmp_path / "a.bin")
    numpy.array([5] * 100, numpy.uint16).tofile(tmp_path / "b.bin")  # a document without an end
    source = open_tokens(context("flat_tokens", tmp_path, UINT16))
    found = [ids_of(document) for index in range(5) for document in source.shard(index, 5, 3)]
    assert sorted(found) == sorted([*documents, [5] * 100])


def test_a_stream_without_ends_is_cut_into_pieces(tmp_path: Path) -> None:
    numpy.arange(200, dtype=numpy.uint16).tofile(tmp_path / "a.bin")
    source = open_tokens(context("flat_tokens", tmp_path, FlatTokensSection(dtype="uint16", end_token_id=-1)))
    pieces = sorted(ids_of(document) for document in source.shard(0, 1, 0))
    assert [*chain.from_iterable(pieces)] == list(range(200))
    assert len(pieces) == 4


@pytest.mark.parametrize("kind", READ)
def test_ids_of_another_vocabulary_are_found_before_training_and_when_read(kind: str, tmp_path: Path) -> None:
    name, path, section = READ[kind]
    asked = context(name, path(tmp_path) if callable(path) else path, section, vocab_size=200)
    (problem,) = problems(asked)
    assert (
        "has the id 257, but the largest id of the vocabulary is 199; set model.tokenizer and model.tokenizer_path to"
        in problem
    )
    with pytest.raises(CorruptRecord, match="has the id 257"):
        next(iter(open_tokens(asked).shard(0, 1, 0)))


def test_inspect_shows_the_text_and_what_is_read(capfd: pytest.CaptureFixture[str]) -> None:
    settings = ["--training.dataset", "datatrove", "--training.dataset_path", str(FOREIGN / "datatrove_uint16.ds")]
    assert main(["data", "inspect", "tiny", *settings, "--training.global_batch_size", "4", "--full"]) == 0
    out = capfd.readouterr().out
    assert "datatrove: 12 documents, 1,194 tokens, as uint16\n" in out
    assert "datatrove: their metadata names the tokenizer titan/byte, which is not compared\n" in out
    assert any(f"{text}<|end_of_text|>" in out for text in TEXTS)


def test_a_wrong_vocabulary_is_one_line_before_anything_is_built(tmp_path: Path) -> None:
    numpy.array([1, 50256], numpy.uint16).tofile(tmp_path / "a.bin")
    settings = {"training.dataset": "flat_tokens", "training.dataset_path": str(tmp_path), "flat_tokens.dtype": "uint16",
                "flat_tokens.end_token_id": "50256"}  # fmt: skip
    with pytest.raises(UserError) as caught:
        make_job("tiny", settings)
    assert "token 1 has the id 50256, but the largest id of the vocabulary is 257" in str(caught.value)
