"""Every file that Titan writes has the mode that the user's umask gives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_core.cli.main import main

TINY = "--training.steps 2 --training.seq_len 16 --training.local_batch_size 1 --job.device cpu"
COMMANDS = (
    f"train llama3_debug --job.dump_folder run --checkpoint.enable --checkpoint.interval 1 {TINY}",
    "checkpoint convert run exported",
    "report run",
    "tokenizer train --training.dataset text --training.dataset_path corpus.txt --output bpe --vocab-size 280",
    "data tokenize --output tokens --workers 1 --parts 1 --training.dataset text --training.dataset_path corpus.txt",
    "recipe copy llama3_debug copied.toml",
)
WRITTEN = (
    "run/**/*.bin", "run/**/metrics.jsonl", "run/**/*.html", "exported/*.safetensors", "exported/config.json",
    "bpe/tokenizer.json", "tokens/*.json", "copied.toml",
)  # fmt: skip
"""Patterns of which each must match a file, so that the test looks at what it is about."""


@pytest.fixture(params=[0o022, pytest.param(0o077, marks=pytest.mark.full)], ids=["022", "077"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


def test_every_file_has_the_mode_of_the_umask(umask: int, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("corpus.txt").write_text("A few words, and a few more of them.\n" * 200)
    for command in COMMANDS:
        assert main(command.split()) == 0, (command, capsys.readouterr().err)
    for pattern in WRITTEN:
        assert list(in_tmp.glob(pattern)), (pattern, sorted(map(str, in_tmp.rglob("*"))))
    wrong = {
        str(path.relative_to(in_tmp)): oct(path.stat().st_mode & 0o777)
        for path in in_tmp.rglob("*")
        if path.is_file() and path.stat().st_mode & 0o777 != 0o666 & ~umask
    }
    assert wrong == {}
