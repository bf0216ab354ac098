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
