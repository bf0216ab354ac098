"""Absurd input: each mistake quickly ends in one clear line and exit status 2, never in a traceback."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from harness.refusals import refused
from titan_core.api._shown import LONGEST_SHOWN, show
from titan_core.api.config.toml import LONGEST, BadToml, parse_toml
from titan_core.cli.main import main
from titan_core.config.load import read_raw
from titan_core.plugins.registry import Components
from titan_testing.jobs import TINY

REGISTRY = Components.from_installed()


@pytest.fixture(autouse=True)
def discovered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discover plugins once, because discovery takes longer than most of these tests."""
    monkeypatch.setattr(Components, "from_installed", lambda: REGISTRY)


DOCUMENTS = {
    "deep lists": "x = " + "[" * 1000 + "]" * 1000,
    "unclosed": "x = " + "[" * 100_000,
    "deep tables": "x = " + "{a = " * 1000 + "1" + "}" * 1000,
    "dotted": ".".join("a" * 1000) + " = 1",
    "a little too deep": "[training]\nsteps = " + "[" * 40 + "]" * 40,
    "digits": "[training]\nsteps = " + "9" * 5000,
    "hexadecimal": "[training]\nsteps = 0x" + "f" * 5000,
    "large": "# " + "x" * LONGEST,
    "nul": "[job]\ndump_folder = 'a\0b'",
    "escaped nul": '[job]\ndump_folder = "a\\u0000b"',
    "date": "[training]\nsteps = 1979-05-27T07:32:00Z",
    "time": "[training]\nseq_len = 07:32:00",
    "nan": "[optimizer]\nlr = nan",
    "inf": "[optimizer]\nweight_decay = inf",
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_malformed_recipe_text(document: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.toml").write_text(DOCUMENTS[document])
    refused(["config", "check", "bad.toml"], capsys, "bad.toml")


@pytest.mark.parametrize("content", [b"\xff\xfe[\0t\0", b"\x80", "[j\u00f6b]".encode("latin-1"), b"\0" * 100], ids=repr)
def test_a_recipe_that_is_not_utf8_text(content: bytes, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.toml").write_bytes(content)
    refused(["config", "check", "bad.toml"], capsys, "bad.toml")


@pytest.mark.parametrize("recipe", ["a" * 300, "a" * 5000 + ".toml", "/dev/zero", "x\0.toml", ".", "file/below.toml", ""])
def test_a_recipe_that_is_not_a_file(recipe: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    refused(["config", "check", recipe], capsys, "")


OVERRIDES = [
    "model.args.dim=1000000000", "model.args.n_layers=1000000", "model.args.vocab_size=1000000000000",
    "model.args.max_seq_len=1000000000000", "data.prefetch=1000000000", "data.num_workers=1000000",
    "data.logical_shards=1000000000000", "data.shuffle_buffer=1000000000000", "data.retries=1000000",
    "data.retry_seconds=1e12", "training.steps=1e30", "training.seq_len=1000000000000",
    "training.global_batch_size=1000000000000", "training.max_norm=1e30", "optimizer.lr=inf", "optimizer.lr=1e30",
    "optimizer.weight_decay=1e30", "optimizer.eps=nan", "optimizer.eps=1e-300",
    "optimizer.param_groups=[{pattern = '*', lr_scale = inf}]", "comm.init_timeout_seconds=1000000000000",
    "comm.train_timeout_seconds=1000000000000", "metrics.log_freq=1000000000000",
    "parallelism.pipeline_parallel_degree=1000000000000",
    "job.dump_folder=a\0b", f"job.dump_folder={'a' * 300}", "job.dump_folder=" + os.fsdecode(b"caf\xe9"),
    f"training.steps={'9' * 5000}", "training.steps=" + "[" * 2000, "training.steps=5\n[job]", "job.description=\0",
]  # fmt: skip


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("override", OVERRIDES, ids=lambda one: ascii(one)[:60])
def test_absurd_values_on_the_command_line(override: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["train", "tiny", f"--{override}"], capsys, override.partition("=")[0].partition(".")[2].split(".")[-1])
    assert list(in_tmp.iterdir()) == []


COMMANDS = [
    ["config", "check", "tiny", "--world-size", str(10**30)],
    ["config", "check", "tiny", "--world-size", "9" * 5000],
    ["config", "check", "tiny", "--world-size", "-1"],
    ["config", "check", "tiny", "--world-size", "\u0662"],
    ["train", "tiny", "--nproc-per-node", str(10**9)],
    ["train", "tiny", "--nproc-per-node", "9" * 5000],
    ["train", "tiny", "--nnodes", str(10**9)],
    ["train", "tiny", "--nnodes", f"1:{10**9}"],
    ["train", "tiny", "--nproc-per-node", "2", "--max-restarts", "-5"],
    ["train", "tiny", "--nproc-per-node", "2", "--max-restarts", str(10**12)],
    ["data", "inspect", "tiny", "--sequences", str(10**12)],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: " ".join(one)[:60])
def test_absurd_arguments_of_commands(command: list[str], in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(command, capsys, "")


def test_a_recipe_may_begin_with_a_byte_order_mark(in_tmp: Path) -> None:
    (in_tmp / "good.toml").write_bytes(b"\xef\xbb\xbf[training]\nsteps = 1\n")
    assert read_raw("good.toml", Components.from_installed()).tables == {"training": {"steps": 1}}


def test_a_section_that_is_a_list_of_tables(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_tmp / "bad.toml").write_text("[[training]]\nsteps = 1\n")
    assert main(["config", "check", "bad.toml"]) == 2
    assert "must be a single table; write [training] once" in capsys.readouterr().err


def test_ranks_beyond_the_world_are_refused(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, size in (("3", "2"), ("0", "9" * 5000), ("-1", "2"), ("0", "0")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        assert main(["train", "tiny"]) == 2
        assert "WORLD_SIZE" in capsys.readouterr().err


def test_a_folder_whose_parent_is_a_file(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    tiny = [text for key, value in TINY.items() for text in (f"--{key}", str(value))]
    assert main(["train", "tiny", *tiny, "--job.dump_folder", "file/run"]) == 2
    errors = capsys.readouterr().err
    assert "job.dump_folder" in errors and "Traceback" not in errors


def test_errors_shorten_long_values() -> None:
    for value in ("x" * 10**6, [1] * 10**5, 2**20_000, {"a": "b" * 1000}, b"bytes", object):
        assert 0 < len(show(value)) <= LONGEST_SHOWN + 3
    deep: list[object] = []
    for _ in range(2000):
        deep = [deep]
    assert show(deep).endswith("]")


def test_toml_within_the_limits_is_read() -> None:
    assert parse_toml("[a]\nb = [[[[1]]]]\n") == {"a": {"b": [[[[1]]]]}}
    with pytest.raises(BadToml) as caught:
        parse_toml("a = 1\nb =\n")
    assert caught.value.line == 2


def test_prefetching_more_than_fits_into_memory_is_refused(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--training.global_batch_size", "1048576", "--training.seq_len", "2048"]
    assert main(["config", "check", "tiny", *large, "--data.prefetch", "2"]) == 2
    assert "data.prefetch = 2: each rank would hold 4.29e+09 tokens in memory" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[unknown_{}]\nx = 1\n", "training.unknown_{} = 1\n"], ids=["tables", "keys"])
def test_of_many_mistakes_the_first_are_printed(text: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.toml").write_text("".join(map(text.format, range(20_000))))
    began = time.process_time()
    assert main(["config", "check", "my.toml"]) == 2
    assert time.process_time() - began < 10  # looking for the nearest name of each took 55 s
    *first, last = capsys.readouterr().err.splitlines()
    assert len(first) == 30 and all(line.startswith("titan: error: my.toml: ") for line in first)
    assert last.startswith("titan: error: and 19,97") and last.endswith(" more mistakes; correct these first")


def test_a_number_that_python_cannot_convert_names_no_function_of_python() -> None:
    with pytest.raises(BadToml, match=r"not valid TOML: an integer has more than 4,300 digits$"):
        parse_toml(f"x = {'9' * 5000}")
