"""Runs docs/pretraining.md: its files and its commands, in order, in one folder, and checks what the page says one sees."""

from __future__ import annotations

import html
import math
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.fake_cuda import why_not
from titan_core.cli.main import main
from titan_core.toolkit.json_lines import read_lines
from titan_core.toolkit.runs.run_log import RunLog
from titan_report.goodput import time_by_cause

PAGE = Path(__file__).parents[2] / "docs/pretraining.md"
SIMULATES = ("estimate", "plan")
"""Commands that load stand-ins for torch's libraries, which only a new process can."""


def blocks() -> list[tuple[str, str]]:
    """Return the language and the text of each block of code of the page."""
    return re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"))


def commands(block: str) -> list[list[str]]:
    """Return the words of each command of a block, as a shell divides them."""
    found, lines = [], ""
    for line in block.replace("\\\n", " ").splitlines():
        lines += line + "\n"
        try:
            words = shlex.split(lines, comments=True)
        except ValueError:  # a quotation goes on in the next line
            continue
        found.append(words)
        lines = ""
    assert not lines
    return found


def run(words: list[str]) -> int:
    """Run a command of the page; return its status."""
    program, *arguments = words
    if program == "python":
        return subprocess.run([sys.executable, *arguments], check=False).returncode
    assert program == "titan"
    if arguments[0] == "train":
        arguments += ["--job.device", "cpu"]
    if arguments[0] not in SIMULATES:
        return main(arguments)
    if why_not() is not None:  # no CUDA build of torch, or no compiler
        return 0
    return subprocess.run([sys.executable, "-m", "titan_core", *arguments], check=False).returncode


def events(run: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(Path(run, "events.jsonl")) if event["event"] == kind]


@pytest.mark.long
def test_each_command_succeeds_and_shows_what_the_page_says(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed: dict[str, str] = {}
    shown = []
    for language, block in blocks():
        name = block.partition("\n")[0].removeprefix("# ")
        if language == "text":
            shown += block.splitlines()
        elif language:
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(block)
        for words in [] if language else commands(block):
            if words[:3] == ["titan", "data", "where"]:  # which documents a step has depends on the version of Python
                words[-1] = place = _last_place(printed["titan data step outputs/pretrain"])
            assert run(words) == 0, words
            printed[" ".join(words[:4])] = capsys.readouterr().out
    assert len(printed) > 15

    assert {folder.name for folder in Path("tokens").iterdir() if folder.is_dir()} == {"prose", "code", "clean"}
    overview = {" ".join(line.split()) for line in printed["titan job show pretrain.toml"].splitlines()}
    assert len(shown) == 4 and {" ".join(line.split()) for line in shown} <= overview
    if why_not() is None:
        assert [stage["name"] for stage in tomllib.loads(Path("planned.toml").read_text())["stages"]] == ["batch", "long"]

    assert [(start["stage"], start["step"]) for start in events("outputs/pretrain", "start")] == [
        ("1", 0), ("batch", 20), ("long", 50),
    ]  # fmt: skip
    metrics = list(read_lines(Path("outputs/pretrain/metrics.jsonl")))
    losses = {record["step"]: record["loss"] for record in metrics if "loss" in record}
    assert list(losses) == [1, *range(10, 81, 10)] and all(map(math.isfinite, losses.values()))
    assert losses[80] < losses[1] - 1
    for key in ("validation_loss/prose", "validation_loss/code", "validation_loss/averaged"):
        assert [record["step"] for record in metrics if key in record] == [40, 80], key
    scored = [record["step"] for record in metrics if "evaluation/clean_text/bits_per_byte" in record]
    assert scored == [0, 40, 80]
    watched = printed["titan watch outputs/pretrain --once"]
    assert "finished, stage 'long'" in watched and "goodput" in watched

    used = printed["titan data step outputs/pretrain"].splitlines()[1:]
    assert {int(line.split()[0]) for line in used} == set(range(16))
    where = printed["titan data where outputs/pretrain"].splitlines()
    assert "60" in [line.split()[0] for line in where[1:]] and all(line.endswith(place) for line in where[1:])

    (origin,), (start,) = events("outputs/anneal", "branch"), events("outputs/anneal", "start")
    assert (origin["step"], start["step"], start["stage"]) == (60, 60, "long")
    (*_, last) = [record for record in read_lines(Path("outputs/anneal/metrics.jsonl")) if "loss" in record]
    (before,) = [record for record in metrics if record["step"] == 60 and "loss" in record]
    assert last["step"] == 80 and last["lr"] < before["lr"] / 10
    assert last["tokens_seen/clean"] > 0
    read = {name: last[f"tokens_seen/{name}"] - before.get(f"tokens_seen/{name}", 0) for name in ("prose", "clean")}
    assert read["prose"] == pytest.approx(read["clean"], rel=0.05)  # continues, with another weight

    assert "step 80, step 75" in printed["titan checkpoint merge outputs/anneal"]
    assert len(printed["titan generate exported --prompt"].strip()) > len("The statement")
    _require_export()
    _require_report()


def _last_place(table: str) -> str:
    """Return the place of the last document that ``titan data step`` printed."""
    return table.splitlines()[-1].rpartition("  ")[2]


def _require_export() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained("exported"), AutoTokenizer.from_pretrained("exported")
    assert model.config.rope_parameters["rope_theta"] == 1e6  # that of the stage
    with torch.no_grad():
        inputs = tokenizer(Path("held_out/prose.jsonl").read_text()[:400], return_tensors="pt")
        loss = model(**inputs, labels=inputs["input_ids"]).loss.item()
    assert loss < math.log(1024) - 1


def _require_report() -> None:
    page = html.unescape(Path("report.html").read_text(encoding="utf-8"))
    assert "Goodput: " in page
    for stage in ("batch", "long"):
        assert f"stage '{stage}' began after step" in page
    for folder in ("outputs/pretrain", "outputs/anneal"):
        run = RunLog.read(folder)
        spent = time_by_cause(run.events, run.times)
        assert spent.difference == pytest.approx(0, abs=0.01)
        assert sum(spent.seconds.values()) == pytest.approx(spent.wall, rel=0.01)
        assert min(spent.seconds[cause] for cause in ("steps", "start", "save", "evaluation")) > 0
