"""Token ids that other tools wrote are read as they are, and what is not understood is refused with the reason.

The files in ``tests/data/foreign`` were written by the libraries whose formats they have (``write.py`` there). nanoGPT, OLMo
and llm.c have no library: their files are written here after their scripts (nanoGPT ``data/openwebtext/prepare.py``, OLMo
``scripts/prepare_memmap_dataset.py``, llm.c ``dev/data/data_common.py``)."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import zstandard

from harness.jobs import make_job
from titan_core.api import CorruptRecord, DatasetContext, ExcludedRecord, UserError, WeightedTokens
from titan_core.cli.main import main
from titan_data.foreign import flat_tokens
from titan_data.foreign.config import FlatTokensSection, InputIdsSection, MdsSection
from titan_data.foreign.formats import check_tokens, describe_tokens, open_tokens
from titan_data.foreign.input_ids import check_input_ids, open_input_ids

FILES = Path(__file__).parent / "foreign"
TEXTS: list[str] = json.loads((FILES / "texts.json").read_text())
END = 257
IDS = [[*text.encode(), END] for text in TEXTS]


def context(name: str, path: Path, section: Any = None, vocab_size: int = 258, **more: Any) -> DatasetContext[Any]:
    where = "training.dataset_path"
    return DatasetContext(name, str(path), "text", 0, where, section=section, vocab_size=vocab_size, **more)


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


def llm_c(folder: Path, magic: int = 20240520, version: int = 1, dtype: type = numpy.uint16) -> Path:
    ids = numpy.array([*chain.from_iterable(IDS)], dtype)
    header = numpy.zeros(256, numpy.int32)
    header[:3] = magic, version, len(ids)
    (folder / "train_000001.bin").write_bytes(header.tobytes() + ids.tobytes())
    return folder


def llama_3(folder: Path) -> Path:
    return llm_c(folder, 20240801, 7, numpy.uint32)


UINT16 = FlatTokensSection(dtype="uint16", end_token_id=END)
HEADER = FlatTokensSection(end_token_id=END)
READ: dict[str, tuple[str, Path | Callable[[Path], Path], Any]] = {
    "megatron, uint16": ("megatron", FILES / "megatron_uint16", None),
    "megatron, int32, documents of several sequences": ("megatron", FILES / "megatron_int32", None),
    "megatron, with its ending": ("megatron", FILES / "megatron_uint16.bin", None),
    "megatron, a glob": ("megatron", FILES / "megatron_u*", None),
    "mds, int32": ("mds", FILES / "mds_int32", MdsSection()),
    "mds, any type": ("mds", FILES / "mds_any", MdsSection()),
    "mds, bytes": ("mds", FILES / "mds_bytes" / "index.json", MdsSection(dtype="int64")),
    "mds, zstd": ("mds", FILES / "mds_zstd", MdsSection()),
    "mds, gz": ("mds", FILES / "mds_gz", MdsSection()),
    "datatrove, uint16": ("datatrove", FILES / "datatrove_uint16.ds", None),
    "datatrove, uint32 with losses": ("datatrove", FILES / "datatrove_uint32.ds", None),
    "nanoGPT": ("flat_tokens", nanogpt, UINT16),
    "OLMo": ("flat_tokens", olmo, UINT16),
    "numpy.save": ("flat_tokens", saved, HEADER),
    "llm.c, GPT-2": ("flat_tokens", llm_c, HEADER),
    "llm.c, Llama 3": ("flat_tokens", llama_3, HEADER),
}


def opened(name: str, asked: DatasetContext[Any]) -> Any:
    return open_input_ids(asked) if name == "input_ids" else open_tokens(asked)


def problems(name: str, asked: DatasetContext[Any]) -> list[str]:
    return [*map(str, check_input_ids(asked) if name == "input_ids" else check_tokens(asked))]


def ids_of(document: Any) -> list[int]:
    ids: list[int] = (document.ids if isinstance(document, WeightedTokens) else document).tolist()
    return ids


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "titan-cache"))


@pytest.fixture(params=[1 << 24, 0], ids=["documents", "pieces"])
def flat_index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest flat dataset whose documents are all located when it is opened."""
    monkeypatch.setattr(flat_tokens, "INDEXED", request.param)


@pytest.mark.usefixtures("flat_index")
@pytest.mark.parametrize("kind", READ)
def test_documents_are_those_that_were_written(kind: str, tmp_path: Path) -> None:
    name, path, section = READ[kind]
    asked = context(name, path(tmp_path) if callable(path) else path, section)
    assert problems(name, asked) == []
    source = opened(name, asked)
    for count in (1, 3):
        found = [document for index in range(count) for document in source.shard(index, count, 0)]
        assert sorted(map(ids_of, found)) == sorted(IDS)
        for document in found:
            if isinstance(document, WeightedTokens):
                assert document.weights.tolist() == [0, 0, 0] + [1] * (len(document.ids) - 3)
    assert source.fingerprint["bytes"] > 0
    lines = describe_tokens(asked)
    assert any("do not record their tokenizer" in line for line in lines)


@pytest.mark.usefixtures("flat_index")
@pytest.mark.parametrize("kind", READ)
def test_reading_resumes_after_any_document(kind: str, tmp_path: Path) -> None:
    name, path, section = READ[kind]
    source = opened(name, context(name, path(tmp_path) if callable(path) else path, section))
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
    source = opened("flat_tokens", context("flat_tokens", tmp_path, UINT16))
    found = [ids_of(document) for index in range(5) for document in source.shard(index, 5, 3)]
    assert sorted(found) == sorted([*documents, [5] * 100])


def test_a_stream_without_ends_is_cut_into_pieces(tmp_path: Path) -> None:
    numpy.arange(200, dtype=numpy.uint16).tofile(tmp_path / "a.bin")
    source = opened("flat_tokens", context("flat_tokens", tmp_path, FlatTokensSection(dtype="uint16", end_token_id=-1)))
    pieces = sorted(ids_of(document) for document in source.shard(0, 1, 0))
    assert [*chain.from_iterable(pieces)] == list(range(200))
    assert len(pieces) == 4


def records(folder: Path, rows: list[dict[str, Any]], ending: str) -> Path:
    import datasets

    table = datasets.Dataset.from_list(rows)
    if ending == "saved":
        table.save_to_disk(str(folder / "saved"))
        return folder / "saved"
    if ending == "parquet":
        table.to_parquet(folder / "data.parquet")
        return folder / "data.parquet"
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "data.jsonl"


@pytest.mark.parametrize("ending", ["saved", "parquet", "jsonl"])
def test_records_with_token_ids(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    rows = [{"input_ids": [*ids, 0, 0], "attention_mask": [1] * len(ids) + [0, 0],
             "labels": [-100, -100, *ids[2:], -100, -100]} for ids in IDS]  # fmt: skip
    asked = context("input_ids", records(tmp_path, rows, ending), InputIdsSection())
    assert problems("input_ids", asked) == []
    found = list(opened("input_ids", asked).shard(0, 1, 0))
    assert sorted(map(ids_of, found)) == sorted(IDS)
    assert all(document.weights.tolist() == [0, 0] + [1] * (len(document.ids) - 2) for document in found)


BAD_RECORDS: dict[str, tuple[Any, str]] = {
    "no column": ({"text": "a"}, "no field 'input_ids' (fields: text); set input_ids.column"),
    "text": ({"input_ids": "1 2 3"}, "column 'input_ids' contains a string that is not a list of token ids"),
    "lists": ({"input_ids": [[1, 2], [3]]}, "column 'input_ids' contains an array that is not a list of token ids"),
    "floats": ({"input_ids": [1.0, 2.0]}, "column 'input_ids' contains an array that is not a list of token ids"),
    "huge": ({"input_ids": [2**70]}, "column 'input_ids' contains an array that is not a list of token ids"),
    "outside": (
        {"input_ids": [1, 258]},
        "token 1 has the id 258, but the largest id of the vocabulary is 257; set model.to",
    ),
    "negative": ({"input_ids": [1, -1]}, "token 1 has the id -1, but the largest id of the vocabulary is 257"),
    "labels": ({"input_ids": [1, 2], "labels": [2, -100]}, "label 0 is 2, but token 0 is 1: labels other than the tokens"),
    "short": ({"input_ids": [1, 2], "labels": [1]}, "column 'labels' has 1 values, but there are 2 token ids"),
    "holes": ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "its attention_mask is 0 between other tokens"),
    "a number": (5, "a record must be a JSON object, not a number"),
}


@pytest.mark.parametrize("mistake", BAD_RECORDS)
def test_records_that_are_not_token_ids_are_refused(mistake: str, tmp_path: Path) -> None:
    record, message = BAD_RECORDS[mistake]
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    asked = context("input_ids", tmp_path, InputIdsSection())
    (problem,) = problems("input_ids", asked)
    assert f"a.jsonl:1: {message}" in problem
    with pytest.raises(CorruptRecord):
        next(opened("input_ids", asked).shard(0, 1, 0))


def test_records_without_a_loss_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [1, 2], "labels": [1, -100]}) + "\n")
    asked = context("input_ids", tmp_path, InputIdsSection())
    assert problems("input_ids", asked) == []
    with pytest.raises(ExcludedRecord, match="all of its labels are -100"):
        next(opened("input_ids", asked).shard(0, 1, 0))


def copied(folder: Path, name: str) -> Path:
    """Copy the files of a fixture; return the path by which a dataset finds them."""
    for file in FILES.glob(f"{name}*"):
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        else:
            shutil.copy(file, folder / file.name)
    return folder / name


def patched(path: Path, at: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(content)] = content
    path.write_bytes(data)


def bad_megatron(change: Callable[[Path, Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        prefix = copied(folder, "megatron_uint16")
        change(Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
        return prefix

    return make


def bad_mds(change: Callable[[dict[str, Any], Path], object], name: str = "mds_int32") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = copied(folder, name)
        contents = json.loads((path / "index.json").read_text())
        change(contents, path)
        (path / "index.json").write_text(json.dumps(contents))
        return path

    return make


def cut(file: Path) -> dict[str, Any]:
    """Compress half of a shard; return what the index says of the file."""
    content = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(content[: len(content) // 2]))
    return {"basename": file.name, "bytes": file.stat().st_size}


def bad_datatrove(change: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        copied(folder, "datatrove_uint32.ds")
        change(folder / "datatrove_uint32.ds")
        return folder

    return make


def flat(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder

    return make


def saved_as(array: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        numpy.save(folder / "a.npy", array)
        return folder

    return make


ENDED = numpy.array([1, 2, END], numpy.uint16).tobytes()
MISTAKES: dict[str, tuple[str, Callable[[Path], Path], Any, str]] = {
    "megatron: nothing there": (
        "megatron",
        lambda folder: folder / "a",
        None,
        "a.idx; set training.dataset_path to the path",
    ),
    "megatron: no data": (
        "megatron",
        bad_megatron(lambda idx, data: data.unlink()),
        None,
        ".bin: is missing beside its index",
    ),
    "megatron: another file": (
        "megatron",
        bad_megatron(lambda idx, data: idx.write_bytes(b"hello")),
        None,
        "is not an index of Megatron-LM",
    ),
    "megatron: older": (
        "megatron",
        bad_megatron(lambda idx, data: patched(idx, 0, b"TNTIDX\0\0")),
        None,
        "older TNTIDX format",
    ),
    "megatron: version": (
        "megatron",
        bad_megatron(lambda idx, data: patched(idx, 9, b"\x02")),
        None,
        "has version 2, but this titan-data reads",
    ),
    "megatron: floats": (
        "megatron",
        bad_megatron(lambda idx, data: patched(idx, 17, b"\x07")),
        None,
        "has code 7 (floats), not 1, 2, 3, 4, 5, 8",
    ),
    "megatron: unknown": (
        "megatron",
        bad_megatron(lambda idx, data: patched(idx, 17, b"\x63")),
        None,
        "has code 99 (unknown), not 1, 2",
    ),
    "megatron: images": (
        "megatron",
        bad_megatron(lambda idx, data: idx.write_bytes(idx.read_bytes() + bytes(12))),
        None,
        "has a mode for each sequence: the dataset is multimodal",
    ),
    "megatron: short index": (
        "megatron",
        bad_megatron(lambda idx, data: idx.write_bytes(idx.read_bytes()[:-1])),
        None,
        "has 281 bytes, but 12 sequences and 13 document bounds take 282",
    ),
    "megatron: short data": (
        "megatron",
        bad_megatron(lambda idx, data: data.write_bytes(data.read_bytes()[:-2])),
        None,
        "has 2,386 bytes, but the index ends at byte 2,388",
    ),
    "megatron: a length": (
        "megatron",
        bad_megatron(lambda idx, data: patched(idx, 34, struct.pack("<i", -5))),
        None,
        "damaged at document 0: it lies outside of the data",
    ),
    "megatron: a bound": (
        "megatron",
        bad_megatron(lambda idx, data: patched(idx, 34 + 12 * 12, struct.pack("<q", 99))),
        None,
        "damaged at document 0",
    ),
    "mds: nothing there": ("mds", lambda folder: folder, MdsSection(), "contains no index.json; name the folder that"),
    "mds: splits": (
        "mds",
        lambda folder: copied(folder, "mds_int32").parent,
        MdsSection(),
        "index.json; name one of its folders: mds_int32",
    ),
    "mds: version": ("mds", bad_mds(lambda index, path: index.update(version=3)), MdsSection(), "has version 3, but this"),
    "mds: format": (
        "mds",
        bad_mds(lambda index, path: index["shards"][0].update(format="json")),
        MdsSection(),
        "has format 'json', not",
    ),
    "mds: another compression": (
        "mds",
        bad_mds(
            lambda index, path: [
                one.update(compression="br:11", zip_data={**one["zip_data"], "basename": "shard.00000.mds.br"})
                for one in index["shards"]
            ],
            "mds_zstd",
        ),
        MdsSection(),
        "shard 0: is compressed (br:11), which titan-data does not read; write the dataset with zstd, gz or bz2",
    ),
    "mds: a lost compressed shard": (
        "mds",
        bad_mds(lambda index, path: (path / "shard.00001.mds.zstd").unlink(), "mds_zstd"),
        MdsSection(),
        "shard.00001.mds.zstd: is missing",
    ),
    "mds: a damaged compressed shard": (
        "mds",
        bad_mds(
            lambda index, path: (path / "shard.00000.mds.gz").write_bytes(bytes(index["shards"][0]["zip_data"]["bytes"])),
            "mds_gz",
        ),
        MdsSection(),
        "shard.00000.mds.gz: cannot be decompressed as gzip",
    ),
    "mds: a short compressed shard": (
        "mds",
        bad_mds(lambda index, path: (path / "shard.00000.mds.zstd").write_bytes(b"1234"), "mds_zstd"),
        MdsSection(),
        "shard.00000.mds.zstd: has 4 bytes, but index.json says 425 and 3 samples",
    ),
    "mds: half a shard, compressed": (
        "mds",
        bad_mds(lambda index, path: index["shards"][0].update(zip_data=cut(path / "shard.00000.mds.gz")), "mds_gz"),
        MdsSection(),
        "shard.00000.mds.gz, sample 1: damaged: it lies at bytes",
    ),
    "mds: a lost shard": (
        "mds",
        bad_mds(lambda index, path: (path / "shard.00001.mds").unlink()),
        MdsSection(),
        "shard.00001.mds: is missing",
    ),
    "mds: a short shard": (
        "mds",
        bad_mds(lambda index, path: (path / "shard.00001.mds").write_bytes(b"")),
        MdsSection(),
        "has 0 bytes, but index",
    ),
    "mds: elsewhere": (
        "mds",
        bad_mds(lambda index, path: index["shards"][0]["raw_data"].update(basename="../x.mds")),
        MdsSection(),
        "names the file '../x.mds', which is not in the folder",
    ),
    "mds: no list": (
        "mds",
        bad_mds(lambda index, path: index["shards"].insert(0, 5)),
        MdsSection(),
        "shard 0: damaged: TypeE",
    ),
    "mds: no type": (
        "mds",
        bad_mds(lambda index, path: None, "mds_bytes"),
        MdsSection(),
        "plain bytes, which do not record the type",
    ),
    "mds: text": (
        "mds",
        bad_mds(lambda index, path: None),
        MdsSection(column="source"),
        "column 'source' is encoded as 'str', and not as an array of integers (columns: source (str), tokens (nda",
    ),
    "mds: no such column": (
        "mds",
        bad_mds(lambda index, path: None),
        MdsSection(column="ids"),
        "has no column 'ids' (columns: source (str), tokens",
    ),
    "mds: no array": (
        "mds",
        bad_mds(
            lambda index, path: [
                one.update(column_names=["a", "b"], column_encodings=["str", "str"]) for one in index["shards"]
            ]
        ),
        MdsSection(),
        "has no column that may be token ids",
    ),
    "mds: a sample": (
        "mds",
        bad_mds(lambda index, path: patched(path / "shard.00000.mds", 4, struct.pack("<I", 5))),
        MdsSection(),
        "shard.00000.mds, sample 0: damaged: it lies at bytes 5 to",
    ),
    "mds: a size": (
        "mds",
        bad_mds(
            lambda index, path: patched(
                path / "shard.00000.mds",
                int(numpy.frombuffer((path / "shard.00000.mds").read_bytes(), "<u4", 1, 4)[0]),
                struct.pack("<I", 10**6),
            )
        ),
        MdsSection(),
        "damaged: its columns are longer than the sample",
    ),
    "datatrove: nothing there": (
        "datatrove",
        lambda folder: folder,
        None,
        "the folder contains no file that ends in .ds; name a .ds file, a glob, or",
    ),
    "datatrove: no index": (
        "datatrove",
        bad_datatrove(lambda file: Path(f"{file}.index").unlink()),
        None,
        "has no .index file beside it",
    ),
    "datatrove: short": (
        "datatrove",
        bad_datatrove(lambda file: file.write_bytes(file.read_bytes()[:-1])),
        None,
        "has 4,775 bytes, but its index ends at token 1,194, of 2 or 4 bytes",
    ),
    "datatrove: short index": (
        "datatrove",
        bad_datatrove(lambda file: Path(f"{file}.index").write_bytes(b"123")),
        None,
        "3 bytes, which are no whole",
    ),
    "datatrove: short losses": (
        "datatrove",
        bad_datatrove(lambda file: Path(f"{file}.loss").write_bytes(b"1")),
        None,
        "has 1 bytes, but there are 1,194",
    ),
    "datatrove: an end": (
        "datatrove",
        bad_datatrove(lambda file: patched(Path(f"{file}.index"), 0, struct.pack("<Q", 10**9))),
        None,
        "document 0 begins at token 0 and ends at 1,000,000,000 of 1,194: damaged",
    ),
    "flat: nothing there": (
        "flat_tokens",
        lambda folder: folder,
        UINT16,
        "the folder contains no file that ends in .bin or .npy",
    ),
    "flat: empty": ("flat_tokens", flat("a.bin", b""), UINT16, "the dataset contains no documents"),
    "flat: no type": (
        "flat_tokens",
        flat("a.bin", ENDED),
        FlatTokensSection(end_token_id=END),
        'no header that records the type of its ids; set flat_tokens.dtype, such as "uint16"',
    ),
    "flat: no end": (
        "flat_tokens",
        flat("a.bin", ENDED),
        FlatTokensSection(dtype="uint16"),
        "do not record which token ends a document; set",
    ),
    "flat: another end": (
        "flat_tokens",
        flat("a.bin", ENDED),
        FlatTokensSection(dtype="uint16", end_token_id=50256),
        "no document ends in its first 3 tokens: none of them is 50256; correct flat_tokens.end_token_id",
    ),
    "flat: another type": (
        "flat_tokens",
        flat("a.bin", ENDED),
        FlatTokensSection(dtype="uint32", end_token_id=END),
        "no whole number of uint32",
    ),
    "flat: megatron's": (
        "flat_tokens",
        lambda folder: copied(folder, "megatron_uint16").parent,
        UINT16,
        "has an index of Megatron-LM beside it",
    ),
    "flat: two dimensions": (
        "flat_tokens",
        saved_as(numpy.zeros((2, 3), numpy.int32)),
        HEADER,
        "is an array [2, 3] of int32, and not one row of",
    ),
    "flat: floats": (
        "flat_tokens",
        saved_as(numpy.zeros(3)),
        HEADER,
        "is an array [3] of float64, and not one row of integers",
    ),
    "flat: a short array": (
        "flat_tokens",
        lambda folder: flat("a.npy", (saved_as(numpy.zeros(3, numpy.int32))(folder) / "a.npy").read_bytes()[:-4])(folder),
        HEADER,
        "has 136 bytes, but its header says 3 tokens, which take 140",
    ),
    "flat: llm.c's version": (
        "flat_tokens",
        lambda folder: llm_c(folder, version=2),
        HEADER,
        "has version 2 of llm.c's format",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_not_understood_is_refused(mistake: str, tmp_path: Path) -> None:
    name, make, section, message = MISTAKES[mistake]
    asked = context(name, make(tmp_path), section)
    (problem,) = problems(name, asked)
    assert message in problem


@pytest.mark.parametrize("kind", READ)
def test_ids_of_another_vocabulary_are_found_before_training_and_when_read(kind: str, tmp_path: Path) -> None:
    name, path, section = READ[kind]
    asked = context(name, path(tmp_path) if callable(path) else path, section, vocab_size=200)
    (problem,) = problems(name, asked)
    assert (
        "has the id 257, but the largest id of the vocabulary is 199; set model.tokenizer and model.tokenizer_path to"
        in problem
    )
    with pytest.raises(CorruptRecord, match="has the id 257"):
        next(iter(opened(name, asked).shard(0, 1, 0)))


@pytest.mark.parametrize(("name", "unpack"), [("mds_zstd", zstandard.decompress), ("mds_gz", gzip.decompress)])
def test_compressed_shards_are_those_decompressed_beside_them(
    name: str, unpack: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asked = context("mds", copied(tmp_path, name), MdsSection())
    assert problems("mds", asked) == []
    assert len(caplog.messages) == 1, "a check decompresses one shard, not all"
    fingerprints = [opened("mds", asked).fingerprint for _ in range(2)]
    assert len(caplog.messages) == 5, "each is decompressed once"
    for file in (tmp_path / name).glob("shard*"):
        file.with_suffix("").write_bytes(unpack(file.read_bytes()))
    assert fingerprints == 2 * [opened("mds", asked).fingerprint]


def test_an_array_with_objects_is_not_unpickled(tmp_path: Path) -> None:
    numpy.save(tmp_path / "a.npy", numpy.array([print], object), allow_pickle=True)
    assert "is an array [1] of object" in problems("flat_tokens", context("flat_tokens", tmp_path, HEADER))[0]


def test_inspect_shows_the_text_and_what_is_read(capfd: pytest.CaptureFixture[str]) -> None:
    settings = ["--training.dataset", "datatrove", "--training.dataset_path", str(FILES / "datatrove_uint16.ds")]
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
