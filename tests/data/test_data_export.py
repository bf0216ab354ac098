"""What ``titan data export`` writes is what Megatron-LM's own library writes, and what is exported is read back."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy
import pytest

from titan_core.api import DatasetContext, UserError
from titan_core.cli.main import main
from titan_data.foreign import export
from titan_data.foreign.formats import open_tokens
from titan_data.tokenized import Part, TokenizedIndex

FILES = Path(__file__).parent / "foreign"
IDS = [[*text.encode(), 257] for text in json.loads((FILES / "texts.json").read_text())]


def tokenised(folder: Path, dtype: str, documents: list[list[int]], parts: int = 3) -> Path:
    """Write ``documents`` as `titan data tokenize` does, in order; part 1 is empty."""
    folder.mkdir()
    each, listed = -(-len(documents) // (parts - 1)), []
    for number in range(parts):
        chosen = [] if number == 1 else documents[(number > 0) * each :][:each]
        name = f"part-{number:05d}"
        numpy.array([*chain.from_iterable(chosen)], dtype).tofile(folder / f"{name}.bin")
        numpy.cumsum([len(one) for one in chosen], dtype="<i8").tofile(folder / f"{name}.idx")
        listed.append(Part(name, len(chosen), sum(map(len, chosen))))
    TokenizedIndex(dtype, "byte", "mark", tuple(listed)).write(folder)
    return folder


def read(prefix: Path) -> list[list[int]]:
    source = open_tokens(DatasetContext("megatron", str(prefix), "text", 0, "here", section=None, vocab_size=2**31))
    return sorted(document.tolist() for document in source.shard(0, 1, 0))


def test_the_files_are_those_of_megatron_core(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tokenised(tmp_path / "tokens", "<u2", IDS)
    assert main(["data", "export", str(folder), "--output", str(tmp_path / "v1.5" / "corpus")]) == 0
    assert "12 documents, 1,194 tokens in " in capsys.readouterr().out
    for ending in (".bin", ".idx"):
        assert (tmp_path / "v1.5" / f"corpus{ending}").read_bytes() == (FILES / f"megatron_uint16{ending}").read_bytes()


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_an_export_is_read_back(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_CHUNK", chunk)
    documents = [[number, 70_000 + number] * number for number in range(40)]  # the first one is empty
    export.export_megatron(tokenised(tmp_path / "tokens", "<u4", documents), tmp_path / "out")
    assert read(tmp_path / "out") == sorted(documents)


def test_mistakes_are_one_clear_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tokenised(tmp_path / "tokens", "<u2", IDS)
    assert main(["data", "export", str(tmp_path), "--output", str(tmp_path / "a")]) == 2
    assert "not a complete tokenised dataset" in capfd.readouterr().err
    (tmp_path / "a.idx").touch()
    assert main(["data", "export", str(folder), "--output", str(tmp_path / "a")]) == 2
    err = capfd.readouterr().err
    assert "a.idx: exists already; name another --output, or remove it" in err
    assert "Traceback" not in err
    assert not (tmp_path / "a.bin").exists()


@pytest.mark.parametrize(("ends", "message"), [([5, 3, 9], "is damaged"), ([3, 5, 8], "is damaged")])
def test_a_damaged_index_is_refused_and_leaves_no_file(tmp_path: Path, ends: list[int], message: str) -> None:
    folder = tokenised(tmp_path / "tokens", "<u2", [[1, 2, 3], [4, 5], [6, 7, 8, 9]], parts=2)
    numpy.array(ends, "<i8").tofile(folder / "part-00000.idx")
    with pytest.raises(UserError, match=message):
        export.export_megatron(folder, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_document_that_megatron_cannot_count_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    with (folder / "part-00000.bin").open("wb") as stream:
        stream.truncate(2 * 2**31)  # sparse
    numpy.array([2**31], "<i8").tofile(folder / "part-00000.idx")
    TokenizedIndex("<u2", "byte", "mark", (Part("part-00000", 1, 2**31),)).write(folder)
    index = export.read_index(folder)
    with pytest.raises(UserError, match=r"document 0 has 2,147,483,648 tokens, and Megatron counts them in 32 bits"):
        list(export._lengths(folder, index))
