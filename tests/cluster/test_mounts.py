"""Which paths of a config a container on Slurm needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_cluster.mounts import mounts
from titan_core.api import UserError


@pytest.mark.parametrize(
    ("config", "outputs", "inputs"),
    [
        ({"data": {"path": "/datasets/a.jsonl"}}, (), ("/datasets/a.jsonl",)),
        ({"data": {"path": ["/datasets/x/*.jsonl", "/datasets/x/[ab]/y"]}}, (), ("/datasets/x",)),
        ({"data": {"sources": [{"args": {"path": "/a"}}, {"args": {"path": "/a/b"}}]}}, (), ("/a",)),
        ({"checkpoint": {"folder": "/scratch/ck"}}, ("/scratch/ck",), ()),
        ({"checkpoint": {"folder": "checkpoint", "load": "s3://bucket/x"}, "model": {"name": "tiny"}}, (), ()),
        ({"data": {"path": "inside/x", "text": "/ no: path, a text", "all": "/", "glob": "/*"}}, (), ()),
        ({"data": {"path": "*.jsonl", "long": "x" * 10_000, "nul": "a\0", "number": 3, "none": None}}, (), ()),
        ({"data": {"path": "/mounted/by/hand"}}, (), ()),
    ],
)
def test_paths_of_a_config(tmp_path: Path, config: dict[str, object], outputs: list[str], inputs: list[str]) -> None:
    (tmp_path / "inside").mkdir()
    found = mounts(tmp_path, config, "outputs/run", ["/somewhere:/mounted"])
    assert found.fixed == (f"{tmp_path}:{tmp_path}", "/somewhere:/mounted")
    assert (found.outputs, found.inputs) == (outputs, inputs)


def test_paths_that_slurm_would_read_as_several_are_refused(tmp_path: Path) -> None:
    for run in ("/a:b", "/a,b"):
        with pytest.raises(UserError, match="contains ',' or ':', which Slurm's --container-mounts separates"):
            mounts(tmp_path, {}, run, [])
    assert mounts(tmp_path, {"data": {"text": "/no path: a text"}}, "run", []).inputs == ()


def test_links_and_relative_paths_that_leave_the_folder(tmp_path: Path) -> None:
    work, away = tmp_path / "work", tmp_path / "away"
    work.mkdir()
    (away / "outputs").mkdir(parents=True)
    (work / "outputs").symlink_to(away / "outputs")
    found = mounts(work, {"data": {"path": "../data/x"}}, "outputs/run", [])
    assert found.outputs == (f"{away}/outputs/run",)
    assert found.inputs == (f"{tmp_path}/data/x",)
