"""Tokenising on a Ray cluster: of two machines one is killed, and the files are those of one machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.letters import letters, stream
from harness.ray_tasks import held, refused
from titan_core.api import BatchPlan, UserError
from titan_data.engines import Engine, LocalEngine, RayEngine, WritePart, Written, _on_a_machine
from titan_data.tokenize import Progress, tokenize

os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # Ray reads it when it is imported
pytest.importorskip("ray", reason="Ray has no wheel for this machine")
PARTS = 5
MACHINE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of one machine of one CPU."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        running = Cluster(initialize_head=True, head_node_args=MACHINE)
        patch.setenv("RAY_ADDRESS", running.address)
        yield running
        running.shutdown()


@dataclass(frozen=True)
class Held:
    """A Ray cluster whose tasks say where they are and wait. Once both machines have one, the second machine is killed."""

    folder: Path
    cluster: Any
    second: Any

    def run(self, write: WritePart, parts: Sequence[int]) -> Iterator[list[Written]]:
        for written in RayEngine().run(partial(held, str(self.folder), write), parts):
            killed = self.folder / "killed"
            started = {file.name.partition("@")[2] for file in self.folder.glob("*@*")}
            if len(started) == 2 and not killed.exists():
                self.cluster.remove_node(self.second, allow_graceful=False)
                (self.folder / "who").write_text(self.second.node_id)
                (self.folder / "who").replace(killed)
            yield written


def written(folder: Path, engine: Engine) -> tuple[list[Progress], dict[str, bytes]]:
    spec = stream(letters(",".join(str(1 + index * 11 % 37) for index in range(60))), plan=BatchPlan(4, 4, 1, 1, 4, 15))
    progress = list(tokenize(spec, spec.datasets[0], "byte", folder, PARTS, engine))
    return progress, {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".partial"}


@pytest.mark.full
def test_a_machine_is_killed_and_the_files_are_those_of_one_machine(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    second = cluster.add_node(**MACHINE)
    progress, files = written(tmp_path / "ray", Held(tmp_path / "held", cluster, second))
    starts = [file.name.partition("@")[0] for file in (tmp_path / "held").glob("*@*")]
    assert len(starts) == PARTS + 1 and len(set(starts)) == PARTS, "the part of the killed machine was begun again"
    assert progress[-1].parts == PARTS == sum(progress[-1].machines.values())
    assert files == written(tmp_path / "local", LocalEngine(1))[1]


@pytest.mark.full
def test_a_mistake_in_a_worker_is_one_error(cluster: Any) -> None:
    with pytest.raises(UserError, match="no tokens today; wait a day"):
        list(RayEngine().run(refused, range(2)))


def test_a_machine_that_does_not_share_the_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not shared: machine .* cannot enter it: No such file or directory"):
        _on_a_machine(refused, 0, str(tmp_path / "not shared"), {})


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "127.0.0.1", "nowhere.invalid:6379"])
def test_without_a_cluster_the_error_says_how_to_start_one(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=r"--engine ray: no Ray cluster can be used: .*ray start --head"):
        list(RayEngine().run(refused, range(2)))
