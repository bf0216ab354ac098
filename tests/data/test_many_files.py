"""Datasets of more files than a process may open, and the error where a plugin opens too many."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy
import pytest

from titan_core.api import UserError
from titan_core.plugins.guard import Origin
from titan_core.toolkit.reading import is_transient
from titan_data.mapped_files import MappedFiles, _pool, detached

FILES = 3000
LIMIT = 64
"""Of open files; a quarter of it are maps."""

PARTS = """
import json, resource, sys
from pathlib import Path
from titan_core.api import DatasetContext
from titan_data.tokenized import open_tokenized
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
source = open_tokenized(DatasetContext("tokenized", sys.argv[1], "text", 3, "here", section=None, vocab_size=70_000))
kept = []  # by whoever read them
for index in range(4):
    kept += source.shard(index, 4, 0)
print(json.dumps([document.tolist() for document in kept]))
"""

LINES = """
import json, resource, sys
from pathlib import Path
from titan_core.api import DatasetContext
from titan_data.record_files import open_local
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
source = open_local(DatasetContext(sys.argv[2], sys.argv[1], "text", 3, "here", section=None))
print(json.dumps([text for index in range(4) for text in source.shard(index, 4, 0)]))
"""


@pytest.mark.full
def test_many_small_files_of_json_lines_are_read_under_a_low_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number:05d}.jsonl").write_text(f'{{"text": "{number}"}}\n')
    for _ in range(2):  # the second start finds the index
        assert sorted(map(int, _under_limit(LINES, folder, "json"))) == list(range(FILES))  # type: ignore[call-overload]
    assert len(list((tmp_path / "cache" / "file-index").iterdir())) == 1, "one index for all of them"


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_many_files_of_rows_are_read_under_a_low_limit(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    folder, count = tmp_path / "data", 400
    folder.mkdir()
    for number in range(count):
        table = pyarrow.table({"text": [str(number)]})
        if form == "parquet":
            pyarrow.parquet.write_table(table, folder / f"{number:05d}.parquet")
        else:
            with pyarrow.ipc.new_stream(str(folder / f"{number:05d}.arrow"), table.schema) as writer:
                writer.write_table(table)
    assert sorted(map(int, _under_limit(LINES, folder, form))) == list(range(count))  # type: ignore[call-overload]
    assert len(list((tmp_path / "cache" / "file-index").iterdir())) == 1, "one index for all of them"


@pytest.mark.full
def test_a_tokenised_dataset_of_many_parts_is_read_under_a_low_limit(tmp_path: Path) -> None:
    parts = []
    for number in range(FILES // 2):  # two files each
        name = f"part-{number:05d}"
        numpy.array([number, number + 1], "<u4").tofile(tmp_path / f"{name}.bin")
        numpy.array([2], "<i8").tofile(tmp_path / f"{name}.idx")
        parts.append({"name": name, "documents": 1, "tokens": 2})
    index = {"format": 1, "dtype": "<u4", "tokenizer": "byte", "fingerprint": "", "parts": parts}
    (tmp_path / "tokenized.json").write_text(json.dumps(index))
    assert sorted(_under_limit(PARTS, tmp_path)) == [[number, number + 1] for number in range(FILES // 2)]


def _under_limit(program: str, folder: Path, *more: str) -> list[object]:
    command = [sys.executable, "-c", program.replace("{limit}", str(LIMIT)), str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout))


def test_a_dataset_opened_again_sees_other_contents_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    numpy.arange(4).tofile(file)
    first = MappedFiles()
    assert first.array(file, "<i8", 8).tolist() == [1, 2, 3]
    (tmp_path / "new").write_bytes(numpy.arange(9).tobytes()[:-3])
    (tmp_path / "new").replace(file)
    assert first.array(file, "<i8").tolist() == [0, 1, 2, 3]
    assert MappedFiles().array(file, "<i8").tolist() == list(range(8))  # 5 bytes are no item
    number = first._number
    assert any(key[0] == number for key in _pool._maps)
    del first
    assert not any(key[0] == number for key in _pool._maps)


def test_documents_are_copied_once_there_are_more_files_than_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps, array = MappedFiles(), numpy.arange(3)
    monkeypatch.setattr(_pool, "full", False)
    monkeypatch.setattr(_pool, "_maps", OrderedDict())  # without those of other tests
    assert detached(array) is array
    monkeypatch.setattr("titan_data.mapped_files._most", lambda: 8)
    for number in range(20):
        (tmp_path / f"{number}").write_bytes(b"abc")
        assert bytes(maps.content(tmp_path / f"{number}")) == b"abc"
    assert len(_pool._maps) == 8
    copy = detached(array)
    assert copy is not array and copy.tolist() == [0, 1, 2] and not copy.flags.writeable


def test_too_many_open_files_are_not_blamed_on_the_plugin() -> None:
    def opens() -> None:
        raise OSError(24, "Too many open files")

    with pytest.raises(UserError) as caught:
        Origin("data", "titan-data", "1.0", "dataset 'json'").call("build", opens)
    (problem,) = caught.value.problems
    assert "as many files open as it may" in problem.why
    assert "ulimit -n" in problem.fix and "titan-data" not in problem.fix
    assert not is_transient(OSError(24, "Too many open files"))  # five retries, each twice as long, would not help
    assert is_transient(OSError(5, "Input/output error"))


@pytest.mark.skipif(sys.platform != "linux", reason="what a map was advised is in /proc")
def test_the_kernel_reads_single_pages_of_an_index(tmp_path: Path) -> None:
    """Not those around it, which a document in random order does not need."""
    for name in ("data", "index"):
        numpy.zeros(1000, "<i8").tofile(tmp_path / name)
    maps = MappedFiles()
    arrays = maps.array(tmp_path / "data", "<i8"), maps.index(tmp_path / "index", "<i8")
    advised = {}
    name = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("VmFlags:"):
            advised[Path(name).name] = "rr" in line.split()
        elif (fields := line.split(maxsplit=5)) and "-" in fields[0]:
            name = fields[5] if len(fields) > 5 else ""
    assert (advised["data"], advised["index"]) == (False, True) and len(arrays) == 2
