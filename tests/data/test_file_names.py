"""Names of files that look like patterns, and names that the process cannot read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_core.api import DatasetContext, UserError
from titan_data.local_files import find_files

ENDINGS = (".jsonl",)


def context(path: object) -> DatasetContext[None]:
    return DatasetContext("json", str(path), "text", 0, "training.dataset_path", section=None)


def written(*files: Path) -> list[Path]:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"text": "a"}\n')
    return sorted(files)


def test_folders_with_brackets_are_folders_also_in_patterns(tmp_path: Path) -> None:
    files = written(tmp_path / "run [1]" / "a.jsonl", tmp_path / "run [1]" / "deep*" / "b.jsonl")
    written(tmp_path / "run 1" / "c.jsonl")
    assert find_files(context(tmp_path / "run [1]"), ENDINGS) == files
    assert find_files(context(files[0]), ENDINGS) == [files[0]]
    assert find_files(context(tmp_path / "run [1]" / "*.jsonl"), ENDINGS) == [files[0]]
    assert find_files(context(tmp_path / "run [1]" / "**" / "*.jsonl"), ENDINGS) == files
    assert find_files(context(tmp_path / "run [1]" / "deep*" / "?.jsonl"), ENDINGS) == [files[1]]
    assert find_files(context(tmp_path / "run [[]1]" / "*.jsonl"), ENDINGS) == [files[0]]
    assert find_files(context(tmp_path / "run [12]" / "*.jsonl"), ENDINGS) == [tmp_path / "run 1" / "c.jsonl"]


BRACKET = ", in which [ begins a set of characters ([[] is the bracket itself)"
PATTERNS = {
    "a.jsonl": "no such file",
    "*.jsonl": "no such file, and none matches it as a pattern",
    "a[1].jsonl": f"no such file, and none matches it as a pattern{BRACKET}",
}


@pytest.mark.parametrize("path", PATTERNS)
def test_a_pattern_that_matches_nothing_is_called_one(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError) as caught:
        find_files(context(tmp_path / path), ENDINGS)
    (problem,) = caught.value.problems
    assert (problem.why, problem.missing) == (PATTERNS[path], True)


def test_a_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl")
    os.rename(bytes(tmp_path / "a.jsonl"), bytes(tmp_path) + b"/\xff.jsonl")
    os.mkfifo(bytes(tmp_path) + b"/\xff.txt")  # of no dataset
    for path in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(UserError) as caught:
            find_files(context(path), ENDINGS)
        why = "its name cannot be read: it contains bytes that are not UTF-8"
        assert str(caught.value) == f"file '{tmp_path}/\\\\xff.jsonl': {why}; write it in UTF-8"


PROBES = """
import os, sys
from titan_core.api import DatasetContext, Section, UserError
from titan_data.local_files import find_files

class Named(Section):
    section = "named"
    path: str = ""

def shown(probe):
    try:
        return probe()
    except (UserError, ValueError) as error:
        return str(error).replace(chr(10), " ")

def found(path):
    return find_files(DatasetContext("json", path, "text", 0, "here", section=None), (".jsonl",))

assert sys.getfilesystemencoding() == "ascii", sys.getfilesystemencoding()
for probe in (lambda: Named(path=sys.argv[1]), lambda: found("."), lambda: found("\\u00fc"), lambda: found("*/*.jsonl")):
    print(shown(probe))
"""


def test_under_a_locale_that_is_not_utf_8_the_locale_is_to_blame(tmp_path: Path) -> None:
    written(tmp_path / "ü" / "a.jsonl")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = subprocess.run(
        [sys.executable, "-c", PROBES, "ü"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert found.returncode == 0, found.stderr
    argument, folder, recipe, pattern = found.stdout.splitlines()
    fix = "set LC_ALL=C.UTF-8, and unset PYTHONUTF8"
    assert f"must be valid Unicode (its bytes are UTF-8, but the locale is not: {fix})" in argument
    assert (
        folder
        == pattern
        == rf"file '\xfc/a.jsonl': its name cannot be read: its bytes are UTF-8, but the locale is not; {fix}"
    )
    assert recipe == rf"here: '\xfc' has characters that the encoding of the locale, ascii, lacks; {fix}"
