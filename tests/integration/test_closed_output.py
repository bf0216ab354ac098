"""A closed output, in every command: training continues without it, every other command ends quietly with the status that a
shell gives for SIGPIPE (docs/cli.md)."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from harness.quick import rows
from harness.terminal import Terminal
from titan_core.api import Command
from titan_core.plugins.registry import Components

TITAN = (sys.executable, "-m", "titan_core")
TINY = "--training.seq_len 16 --training.local_batch_size 1 --training.global_batch_size 2 --job.device cpu"
PRINTS = (
    "plugins", "recipes", "--help", "--version", "plugins --json", "config show llama3_debug", "config check llama3_debug",
    "config schema", "job show llama3_debug", "recipe copy llama3_debug copied.toml", "completion bash",
    "checkpoint list run", "checkpoint show run", "checkpoint verify run", "checkpoint convert run exported",
    "report run --output page.html", "watch run --once", "data inspect llama3_debug --training.seq_len 16",
    "data step run 1", "doctor", "generate run --prompt x --max-new-tokens 2",
    "launch slurm llama3_debug --nproc-per-node 1",
)  # fmt: skip
"""Commands that print something."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has a checkpoint."""
    folder = tmp_path_factory.mktemp("closed")
    command = f"train llama3_debug --job.dump_folder run --checkpoint.enable --training.steps 2 {TINY}"
    assert ended(command, subprocess.DEVNULL, folder)[0] == 0
    return folder


def folder_for(command: str, request: pytest.FixtureRequest) -> Path:
    """Return the folder to call a command in: only some of them need a run."""
    return cast(Path, request.getfixturevalue("trained" if "run" in command.split() else "tmp_path"))


def ended(command: str, out: Any, folder: Path, err: Any = subprocess.PIPE) -> tuple[int, str]:
    """Run ``titan`` with its output in ``out``; return its status, and what it says on standard error."""
    done = subprocess.run([*TITAN, *shlex.split(command)], stdout=out, stderr=err, cwd=folder, text=True, check=False)
    return done.returncode, done.stderr


def broken_pipe() -> int:
    """Return a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("command", rows(PRINTS, ["plugins", "--help"]))
def test_a_command_whose_output_nobody_reads_ends_quietly(command: str, request: pytest.FixtureRequest) -> None:
    pipe = broken_pipe()
    status, said = ended(command, pipe, folder_for(command, request))
    os.close(pipe)
    assert (status, "Traceback" in said, "Broken pipe" in said, "plugin" in said) == (141, False, False, False), said


@pytest.mark.parametrize("command", rows(PRINTS[:14], ["plugins"]))
def test_a_command_may_lose_its_reader_after_the_first_line(command: str, request: pytest.FixtureRequest) -> None:
    arguments, folder = [*TITAN, *shlex.split(command)], folder_for(command, request)
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode in (0, 1, 141), said  # 0 or 1 if it had written everything: `doctor` ends with 1
    assert not any(word in said for word in ("Traceback", "Broken pipe", "Exception ignored", "plugin")), said


@pytest.mark.full
def test_every_command_has_a_help_that_may_be_closed(tmp_path: Path) -> None:
    for command in Components.from_installed().all(Command):
        pipe = broken_pipe()
        assert ended(f"{command.name} --help", pipe, tmp_path) == (141, "")
        os.close(pipe)


@pytest.mark.parametrize(
    ("streams", "status"),
    [(">&-", 141), pytest.param("2>&-", 0, marks=pytest.mark.full), pytest.param(">&- 2>&-", 141, marks=pytest.mark.full)],
)
def test_a_descriptor_that_is_closed_from_the_start(streams: str, status: int, tmp_path: Path) -> None:
    line = f"{shlex.join(TITAN)} recipes {streams}"
    assert subprocess.run(["sh", "-c", line], capture_output=True, cwd=tmp_path).returncode == status


@pytest.mark.full
def test_an_error_keeps_its_status(tmp_path: Path) -> None:
    pipe = broken_pipe()
    assert ended("no-such-command", pipe, tmp_path, err=pipe)[0] == 2
    os.close(pipe)


OBSERVER = """
import sys
from titan_core.api import hookimpl
api = (1, 0)
@hookimpl
def titan_step_start(step):
    print("a plugin's line", file=sys.stderr, flush=True)
"""


def findings(folder: Path) -> list[str]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["message"] for event in events if event["event"] == "finding"]


@pytest.mark.parametrize(
    ("ranks", "file"), [("", "events.jsonl"), pytest.param("--nproc-per-node 2", "logs/rank-0.log", marks=pytest.mark.full)]
)
def test_training_continues_without_a_console_and_says_so_once(ranks: str, file: str, tmp_path: Path) -> None:
    out, err = broken_pipe(), broken_pipe()
    (tmp_path / "talks.py").write_text(OBSERVER)
    command = f"--plugin talks.py train llama3_debug --job.dump_folder run --training.steps 4 {TINY} {ranks}"
    assert ended(command, out, tmp_path, err)[0] == 0
    os.close(out)
    os.close(err)
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()][-1] == 4
    text = (tmp_path / "run" / file).read_text()
    for stream in ("standard output", "standard error"):
        assert text.count(f"{stream} cannot be written: Broken pipe") == 1
    assert "observer" not in text


def closed_terminal(folder: Path, ranks: str = "", prefix: str = "") -> int:
    """Train in a terminal, close it after the first step, and return the exit status."""
    command = f"train llama3_debug --job.dump_folder run --checkpoint.enable --training.steps 100000 {TINY} {ranks}"
    line = f"cd {folder}; {prefix} exec {shlex.join(TITAN)} {command} --metrics.log_freq 1"
    terminal = Terminal(["/bin/sh", "-c", line])
    terminal.wait_for("tok/s")
    os.close(terminal._master)
    _, status = os.waitpid(terminal.pid, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "status"), [("", 75), ("--nproc-per-node 2", 129)], ids=["1 process", "2 processes"])
def test_a_closed_terminal_ends_a_job_after_its_step_with_a_checkpoint(ranks: str, status: int, tmp_path: Path) -> None:
    assert closed_terminal(tmp_path, ranks) == status
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "end" and events[-1]["preempted"]
    assert (tmp_path / f"run/checkpoint/step-{events[-1]['step']}/checkpoint.json").exists()


@pytest.mark.full
def test_under_nohup_a_closed_terminal_ends_only_the_console(tmp_path: Path) -> None:
    """The shell ignores SIGHUP before it starts the command, as nohup does; the job is stopped by SIGTERM afterwards."""
    command = f"train llama3_debug --job.dump_folder run --checkpoint.enable --training.steps 100000 {TINY}"
    terminal = Terminal(
        ["/bin/sh", "-c", f"trap '' HUP; cd {tmp_path}; exec {shlex.join(TITAN)} {command} --metrics.log_freq 1"]
    )
    terminal.wait_for("tok/s")
    os.close(terminal._master)
    # Standard error, which shows the progress, or standard output.
    while " cannot be written: Input/output error" not in (tmp_path / "run/events.jsonl").read_text():
        assert os.waitpid(terminal.pid, os.WNOHANG) == (0, 0)
    terminal.send(signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 75
    lines = [line for line in findings(tmp_path / "run") if line.startswith("standard ")]
    assert lines and len(lines) == len(set(lines))
