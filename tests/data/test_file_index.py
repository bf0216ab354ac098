"""Indexes of local files: made once, by whichever process comes first, read from the cache, and never trusted."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy
import pytest

from titan_core.api import DatasetContext, UserError
from titan_data import file_index, json_lines, made_once
from titan_data.csv_files import open_csv
from titan_data.file_index import FileIndex, _divided
from titan_data.json_lines import JsonRecords
from titan_data.record_files import open_local


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "file-index"


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read to locate their lines."""
    made: list[Path] = []
    scan = json_lines._scan

    def counted(file: Path, *more: Any) -> Any:
        made.append(file)
        return scan(file, *more)

    monkeypatch.setattr(json_lines, "_scan", counted)
    return made


def text(record: Any, place: str) -> str:
    return f"{record['text']} {place.rpartition(':')[2]}"


def records(*files: Path) -> list[str]:
    found = JsonRecords(files, files, text)
    return [str(found.text(index)) for index in range(len(found))]


def write(file: Path, *lines: str) -> Path:
    file.write_text("".join(line if line in ("", " \t\n", "\n") else json.dumps({"text": line}) + "\n" for line in lines))
    return file


def test_lines_are_located_once(tmp_path: Path, scans: list[Path], cache: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", "a", "\n", " \t\n", "bc", "\n"), write(tmp_path / "b.jsonl", "ß")
    empty = write(tmp_path / "empty.jsonl")
    expected = ["a 1", "bc 4", "ß 1"]
    assert records(first, empty, second) == expected
    assert scans == [first, empty, second]
    assert records(first, empty, second) == expected
    assert len(scans) == 3
    (index,) = cache.iterdir()
    assert not index.name.startswith(".")


@pytest.mark.parametrize("chunk", [1, 3, 16, 1 << 24])
def test_lines_and_records_are_those_of_python_in_any_chunks(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_CHUNK", chunk)
    monkeypatch.setattr("titan_data.csv_files._CHUNK", chunk)
    monkeypatch.setattr(file_index, "_BLOCK", 2)
    lines = ["\n", "one", "\n", "", "a longer line " * 9, " \t\n", "ü", "\n", "last"]
    file = write(tmp_path / "a.jsonl", *lines)
    file.write_bytes(file.read_bytes()[:-1])  # without the last line end
    numbered = [json.loads(line)["text"] + f" {number}" for number, line in enumerate(file.open(), 1) if line.strip()]
    assert records(file) == numbered
    table = 'name,text\r\n1,"two\nlines, ""quoted"""\n\n2,ü\r\n3,"x"'
    (tmp_path / "t.csv").write_text(table, newline="")
    context = DatasetContext("csv", str(tmp_path / "t.csv"), "text", 3, "here", section=None)
    assert sorted(map(str, open_csv(context).shard(0, 1, 0))) == ['two\nlines, "quoted"', "x", "ü"]


def test_a_second_start_reads_almost_none_of_the_corpus(tmp_path: Path, scans: list[Path]) -> None:
    """Measured by the kernel: the bytes that read() returned, and the pages of the corpus in memory."""
    file = tmp_path / "large.jsonl"
    line = json.dumps({"text": "x" * 1000}) + "\n"
    file.write_text(line * 30_000)

    def bytes_read() -> int:
        counters = dict(one.split(": ") for one in Path("/proc/self/io").read_text().splitlines())
        return int(counters["rchar"])

    before = bytes_read()
    first = JsonRecords([file], [file], text)
    located = bytes_read()
    assert located - before > file.stat().st_size
    second = JsonRecords([file], [file], text)
    assert bytes_read() - located < 100_000
    assert len(scans) == 1
    assert len(first) == len(second) == 30_000
    assert first.text(29_999) == second.text(29_999) == "x" * 1000 + " 30000"


@pytest.mark.parametrize("change", ["content", "time", "size", "renamed", "another file"])
def test_a_changed_file_is_indexed_again(tmp_path: Path, scans: list[Path], change: str) -> None:
    file = write(tmp_path / "a.jsonl", "a", "bc")
    status = file.stat()
    records(file)
    if change == "content":  # with its size and time
        write(file, "ab", "c")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        expected = ["ab 1", "c 2"]
    elif change == "time":
        os.utime(file, ns=(1, 1))
        expected = ["a 1", "bc 2"]
    elif change == "size":
        write(file, "abc")
        expected = ["abc 1"]
    elif change == "renamed":
        file = file.rename(tmp_path / "b.jsonl")
        expected = ["a 1", "bc 2"]
    else:
        file = write(tmp_path / "b.jsonl", "ab", "c")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        expected = ["ab 1", "c 2"]
    assert records(file) == expected
    assert len(scans) == 2


def test_an_index_with_any_byte_changed_is_made_again(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "a.jsonl", "a", "\n", "bc", "d")
    expected = records(file)
    (index,) = cache.iterdir()
    whole = index.read_bytes()
    for place in range(len(whole)):
        index.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert records(file) == expected, place
        assert next(cache.iterdir()).read_bytes() == whole
    for length in (0, 1, 8, len(whole) - 8, len(whole) - 1):
        index.write_bytes(whole[:length])
        assert records(file) == expected, length
    index.write_bytes(whole + b"\0" * 8)
    assert records(file) == expected
    assert index.read_bytes() == whole


def test_an_index_that_is_removed_while_it_is_used_is_made_again(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "a.jsonl", "a", "bc")
    found = JsonRecords([file], [file], text)
    (index,) = cache.iterdir()
    index.unlink()
    assert [found.text(number) for number in (1, 0)] == ["bc 2", "a 1"]
    assert index.exists()


def test_a_file_that_changes_under_a_running_job_is_one_clear_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", "a", "bc")
    found = JsonRecords([file], [file], text)
    write(tmp_path / "other", "abcdef", "g").replace(file)
    with pytest.raises(UserError, match=r"a\.jsonl: has changed since its lines were located.*restart the job"):
        found.text(1)


def test_without_a_folder_to_write_to_each_start_makes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, scans: list[Path]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "file"))
    file = write(tmp_path / "a.jsonl", "a", "bc")
    with caplog.at_level(logging.WARNING):
        assert records(file) == records(file) == ["a 1", "bc 2"]
    assert len(scans) == 2
    assert "is not kept, and is made at each start" in caplog.text


def test_a_file_that_cannot_be_read_is_an_error_of_the_file(tmp_path: Path) -> None:
    def fails(file: Path) -> Any:
        yield numpy.zeros(1, numpy.int64)
        raise OSError(5, "Input/output error", str(file))

    file = write(tmp_path / "a.jsonl", "a")
    with pytest.raises(OSError, match=r"Input/output error: .*a\.jsonl"):
        FileIndex([file], "failing", fails)


OPEN = """
import sys
from contextlib import ExitStack
from pathlib import Path
from titan_data import json_lines
made, scan = [], json_lines._scan
def counted(file, *more):
    made.append(file.name)
    return scan(file, *more)
json_lines._scan = counted
files = sorted(Path(sys.argv[1]).glob("*.jsonl"))
print("ready", flush=True)
sys.stdin.readline()
found = json_lines.JsonRecords(files, files, lambda record, place: record["text"])
assert sorted(found.text(index) for index in range(len(found))) == sorted(str(n) for n in range(len(files) * 2))
print(",".join(made), flush=True)
"""


def test_processes_divide_the_files_among_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While this process holds the lock of the first file, others index the rest; none indexes a file twice."""
    monkeypatch.setattr(file_index, "_GROUP", 1)
    program = f"from titan_data import file_index\nfile_index._GROUP = 1\n{OPEN}"
    files = [write(tmp_path / f"{number}.jsonl", str(2 * number), str(2 * number + 1)) for number in range(6)]
    name = file_index._key("lines of JSON, version 1", [(files[0], files[0].stat())])
    lock = file_index.cache_folder(file_index.FOLDER) / f".{name}.lock"
    lock.parent.mkdir(parents=True)
    command = [sys.executable, "-c", program, str(tmp_path)]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for process in others:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "ready\n"
            process.stdin.write("\n")
            process.stdin.flush()
        while len([file for file in lock.parent.iterdir() if not file.name.startswith(".")]) < 5:
            assert all(process.poll() is None for process in others)
    made = [name for process in others for name in process.communicate()[0].strip().split(",") if name]
    assert sorted(made) == [file.name for file in files]


def test_groups_of_files() -> None:
    assert list(_divided([], 10)) == []
    assert list(_divided([5, 5, 1, 20, 3, 0, 7, 1], 10)) == [(0, 2), (2, 3), (3, 4), (4, 7), (7, 8)]


def test_files_without_lines_are_left_to_the_library(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"},\n{"text": "b"}]')
    write(tmp_path / "b.json", "c")
    context = DatasetContext("json", str(tmp_path / "a.json"), "text", 3, "here", section=None)
    assert sorted(map(str, open_local(context).shard(0, 1, 0))) == ["a", "b"]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    assert not JsonRecords(files, files, text).are_lines
    assert JsonRecords(files[1:], files[1:], text).are_lines


def test_a_lock_that_its_holder_has_removed_meanwhile_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process holds the next one: both would make the file."""
    path, lock = tmp_path / "made", tmp_path / ".made.lock"
    flock = fcntl.flock
    with ExitStack() as others:

        def overtaken(stream: IO[str], operation: int) -> None:
            monkeypatch.setattr(fcntl, "flock", flock)
            lock.unlink()
            flock(others.enter_context(lock.open("w")), fcntl.LOCK_EX)
            flock(stream, operation)

        monkeypatch.setattr(fcntl, "flock", overtaken)
        with made_once._locked(path, wait=False) as mine:
            assert not mine
    with made_once._locked(path, wait=False) as mine:
        assert mine and lock.exists()
    assert not lock.exists()
