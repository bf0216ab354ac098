"""Runs docs/plugins/tutorial.md: its files and its commands, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.distributions import python_path

PAGE = Path(__file__).parents[2] / "docs/plugins/tutorial.md"


def blocks() -> list[tuple[str, str]]:
    """Return the language and the text of each block of code of the page."""
    return re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"))


def write_files() -> dict[str, str]:
    """Write the files of the page to the current folder; return the environment of its commands."""
    for _, text in [block for block in blocks() if block[0]]:
        name = text.partition("\n")[0].removeprefix("# ")
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    return {**os.environ, "PYTHONPATH": python_path(Path("site").absolute()), "CUDA_VISIBLE_DEVICES": ""}


def run(command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program, *words = shlex.split(command)
    if program == "uv":  # into a folder of the test, in place of its environment
        words = ["uv", *(word for word in words if word != "-e"), "--quiet", "--python", sys.executable, "--target", "site"]
    else:
        words = [sys.executable, "-m", "titan_core", *words]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_each_command_of_the_page_succeeds(in_tmp: Path) -> None:
    environment = write_files()
    commands = [line for language, text in blocks() if not language for line in text.splitlines()]
    assert [command.split()[1] for command in commands] == ["pip", "plugins", "config", "train", "verify", "--plugin"]
    for command in commands:
        done = run(command, environment)
        assert done.returncode == 0, done.stdout + done.stderr
        if command == "titan plugins":
            assert "tinylm" in done.stdout


@pytest.mark.full
def test_the_mistakes_that_the_page_proposes_are_refused(in_tmp: Path) -> None:
    environment = write_files()
    plugin, racks = Path("src/tinylm/plugin.py"), Path("racks.py")
    right = plugin.read_text()
    plugin.write_text(right.replace('"blocks.*.attention.mixer"', '"blocks.*.attention.mix"'))
    assert run("uv pip install --no-deps -e .", environment).returncode == 0
    refused = run("titan train my.toml", environment)
    assert refused.returncode == 2 and "blocks.*.attention.mix" in refused.stderr, refused.stderr

    plugin.write_text(right)
    summed = racks.read_text()
    racks.write_text(summed.replace(', sums=("rack",)', ""))
    refused = run("titan --plugin racks.py config check my.toml --world-size 2 --racks.count 2", environment)
    assert refused.returncode == 2 and "rack" in refused.stderr, refused.stderr
    racks.write_text(re.sub(r"dist\.all_reduce\(.*\)", "pass", summed))
    assert run("uv pip install --no-deps --upgrade .", environment).returncode == 0
    refused = run("titan --plugin racks.py train my.toml --nproc-per-node 2 --racks.count 2", environment)
    assert refused.returncode != 0 and "gradient" in refused.stderr, refused.stderr
