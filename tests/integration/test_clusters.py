"""``titan launch`` with the recipes of other packages: the rendered files in docs/cluster.md, files that are missing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ci.workspace import ROOT
from titan_core.cli.main import main

PAGE = ROOT / "docs/cluster.md"
HOME = "/home/me/project"


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (["--checkpoint.enable", "false"],
         "the job saves nothing: whenever the cluster starts it again, all of its steps are lost; set checkpoint.enable = "),
        (["--checkpoint.enable", "true", "--checkpoint.interval", "50"],
         "checkpoint.interval = 50, and the job has 50 steps: after a failure, all of them are lost; set checkpoint."),
        (["--checkpoint.enable", "true", "--checkpoint.interval", "49"], ""),
    ],
    ids=["never", "too late", "in time"],
)  # fmt: skip
def test_a_job_that_would_lose_its_steps_when_it_is_started_again_says_so(
    options: list[str], warning: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["launch", "slurm", "llama3_debug", "--nodes", "1", "--nproc-per-node", "1", "--training.steps", "50"]
    assert main([*job, *options]) == 0
    error = capsys.readouterr().err
    assert ("titan: warning: " in error) == bool(warning) and warning in error


@pytest.mark.parametrize("cluster", ["slurm", "kubernetes", "skypilot"])
def test_rendered_files_in_the_docs(cluster: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"`(titan launch {cluster} my\.toml [^`]+)`[^`]*\n```(?:bash|yaml)\n(.+?)```\n", text, re.DOTALL)
    assert found is not None, f"no rendered file of {cluster}"
    command, shown = found.groups()
    recipe = re.search(r"^recipe='(.+?)'$", text, re.DOTALL | re.MULTILINE)
    assert recipe is not None
    Path("my.toml").write_text(recipe[1])
    assert main(shlex.split(command)[1:]) == 0
    rendered = capsys.readouterr().out.replace(str(in_tmp), HOME)
    rendered = re.sub(r"\S+/bin/titan$", f"{HOME}/.venv/bin/titan", rendered, flags=re.MULTILINE)
    if cluster == "slurm":
        rendered = rendered[: rendered.index("\n\n# Run a command") + 1]
    assert shown == rendered


def test_files_that_only_the_machines_have(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["launch", "slurm", "llama3_8b", "--nodes", "4", "--gpus-per-node", "8"]
    assert main(job) == 2
    error = capsys.readouterr().err
    assert (
        "no such file" in error and "titan: if only the machines of the cluster have such files, add --missing-ok\n" in error
    )
    assert main([*job, "--missing-ok"]) == 0
    assert "titan: note: llama3_8b: model.tokenizer_path" in capsys.readouterr().err
