"""The key that the machines of a job share, and the records that they sign with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from titan_core.api import UserError
from titan_core.api.config.secrets import is_secret
from titan_core.cli.main import main
from titan_core.toolkit.launching import JOB_KEY
from titan_launch.meeting.signed_store import Forged, SignedStore, job_key

GOOD = "0123456789abcdef" * 4
TWO_MACHINES = ["train", "tiny", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1"]


class Memory:
    """A store within this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def compare_set(self, key: str, expected_value: bytes, desired_value: bytes) -> bytes:
        before = self.values.get(key)
        if (before is None and expected_value == b"") or before == expected_value:
            self.values[key] = desired_value
        return self.values.get(key, expected_value)

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{GOOD}\n")
    path.chmod(0o600)
    return path


def test_the_key_is_that_of_the_file_or_of_the_environment(file: Path) -> None:
    assert job_key(str(file), {JOB_KEY: "another one" * 9}) == GOOD.encode()
    assert job_key(None, {JOB_KEY: GOOD}) == GOOD.encode()
    assert is_secret(JOB_KEY)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644])
def test_a_file_that_others_can_read_or_change_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(UserError, match=rf"other users may read or change it \(mode {mode:04o}\); make a new key, and"):
        job_key(str(file), {})


def test_what_is_no_key_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"TITAN_JOB_KEY: has 5 characters, but a key needs 32; make one by `openssl rand"):
        job_key(None, {JOB_KEY: "short"})
    file.write_text("")
    with pytest.raises(UserError, match="has 0 characters"):
        job_key(str(file), {})
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match="cannot be read"):
        job_key(str(file), {})
    with pytest.raises(UserError, match="cannot be read: No such file"):
        job_key(str(tmp_path / "none"), {})
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UserError, match="is not a regular file"):
        job_key(str(tmp_path / "pipe"), {})


def test_machines_without_a_key_are_told_how_to_make_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(JOB_KEY, raising=False)
    assert main(TWO_MACHINES) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "TITAN_JOB_KEY: is not set" in error
    assert "export TITAN_JOB_KEY=$(openssl rand -hex 32), and give every machine of the job the same one" in error


@pytest.mark.parametrize("value", [None, 3, {"a": ["é", 1.5, None]}, "\u2028"])
def test_a_record_returns_what_was_written(value: Any) -> None:
    records = SignedStore(Memory(), GOOD.encode(), "job")
    records.write("a", value)
    assert records.read("a") == value and records.read("b") is None


def test_a_record_cannot_be_forged_moved_or_given_to_another_job() -> None:
    store = Memory()
    mine = SignedStore(store, GOOD.encode(), "job")
    text = mine.sealed("job-1/3/end", {"status": 0})
    others = [
        ("another key", SignedStore(store, b"x" * 32, "job"), "job-1/3/end"),
        ("another job", SignedStore(store, GOOD.encode(), "job2"), "job-1/3/end"),
        ("another round", mine, "job-1/4/end"),
        ("another record", mine, "job-1/3/plan"),
    ]
    for what, records, name in others:
        store.set(records.place(name), text)
        assert records.read(name) is None, what
        with pytest.raises(Forged):
            records.opened(name, text)
    for damaged in (b"", b" ", text[1:], text.replace(b"0}", b"1}"), text + b" ", text.partition(b" ")[2], b"\x80"):
        with pytest.raises(Forged):
            mine.opened("job-1/3/end", damaged)
