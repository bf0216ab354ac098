"""Checkpoints of the newest steps on each machine, from which restarted ranks resume."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.gloo_pool import GlooPool
from harness.jobs import TINY, RunRecord, run_recipe
from harness.resuming import run_in
from titan_ckpt import store
from titan_ckpt.folder import Folder
from titan_ckpt.local_checkpoints import LocalCheckpoints
from titan_core.api import UserError, hookimpl
from titan_core.toolkit.launching import RESTART


class Fails:
    """Fails before the update of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    @hookimpl
    def titan_before_update(self, update: Any) -> None:
        if update.step == self._step:
            raise RuntimeError("a fault")


class OfOneMachine(LocalCheckpoints):
    """As if each rank were on a machine of its own."""

    def __init__(self, section: Any, durable: Folder, world: Any) -> None:
        own = section.model_copy(update={"local_folder": f"{section.local_folder}/machine-{world.rank}"})
        super().__init__(own, durable, world)


def attempt(
    folder: str, settings: dict[str, Any], restart: bool = False, fails: int = 0, machines: bool = False
) -> RunRecord | str:
    """Run one attempt, and return its record, or its error."""
    os.environ.pop(RESTART, None)
    if restart:
        os.environ[RESTART] = "{}"
    if machines:
        os.environ["LOCAL_RANK"] = "0"
        store.LocalCheckpoints = OfOneMachine  # type: ignore[misc]
    local = {"checkpoint.local_interval": 1, "checkpoint.local_folder": f"{folder}/local", "checkpoint.interval": 3}
    try:
        return run_in(folder, {**local, **settings}, observers=(Fails(fails),) if fails else ())
    except RuntimeError as error:
        return str(error)
    finally:
        if machines:
            os.environ["LOCAL_RANK"] = os.environ["RANK"]
        store.LocalCheckpoints = LocalCheckpoints  # type: ignore[misc]
        os.environ.pop(RESTART, None)


def local_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "local").rglob("step-*"))


@pytest.fixture(scope="module")
def whole(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    return gloo.run(2, run_in, str(tmp_path_factory.mktemp("whole")), {})


@pytest.mark.full
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_restarted_job_resumes_from_the_newest_step(
    gloo: GlooPool, whole: list[RunRecord], tmp_path: Path, mode: str
) -> None:
    settings = {"checkpoint.async_mode": mode}
    assert gloo.run(2, attempt, str(tmp_path), settings, fails=6)[0] == "a fault"
    # A local checkpoint does not wait for the durable one of step 3, which may take until the fault.
    newest = max(3, *(int(name.removeprefix("step-")) for name in local_steps(tmp_path)))
    assert newest == 5 or mode == "async"
    records = gloo.run(2, attempt, str(tmp_path), settings, restart=True)
    for one, record in zip(whole, records, strict=True):
        assert record.losses == one.losses[-len(record.losses) :]  # bit for bit
        assert len(record.losses) == 8 - newest
    assert local_steps(tmp_path) == [] and not list((tmp_path / "local").glob("titan-*"))


@pytest.mark.full
def test_a_job_that_a_person_starts_again_resumes_from_the_durable_one(
    gloo: GlooPool, whole: list[RunRecord], tmp_path: Path
) -> None:
    gloo.run(2, attempt, str(tmp_path), {}, fails=6)
    records = gloo.run(2, attempt, str(tmp_path), {})
    assert [record.losses for record in records] == [one.losses[3:] for one in whole]


@pytest.mark.full
def test_a_restarted_job_on_another_machine_does_not_use_what_an_earlier_job_left_there(
    gloo: GlooPool, whole: list[RunRecord], tmp_path: Path
) -> None:
    """The earlier job's is newer, and of the same run directory."""
    here, there = ({"checkpoint.local_folder": f"{tmp_path}/local/{name}"} for name in ("here", "there"))
    gloo.run(2, attempt, str(tmp_path), there, fails=6)
    shutil.rmtree(tmp_path / "outputs")
    gloo.run(2, attempt, str(tmp_path), here, fails=5)
    assert local_steps(tmp_path) == ["step-4", "step-5"]
    records = gloo.run(2, attempt, str(tmp_path), there, restart=True)
    assert [record.losses for record in records] == [one.losses[3:] for one in whole]


@pytest.mark.full
@pytest.mark.parametrize("damage", ["data-00001.bin", "checkpoint.json"])
def test_a_damaged_one_is_not_used(gloo: GlooPool, whole: list[RunRecord], tmp_path: Path, damage: str) -> None:
    gloo.run(2, attempt, str(tmp_path), {}, fails=6)
    (file,) = (tmp_path / "local").rglob(f"step-5/{damage}")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    records = gloo.run(2, attempt, str(tmp_path), {}, restart=True)
    assert [record.losses for record in records] == [one.losses[3:] for one in whole]


@pytest.mark.full
def test_ranks_that_do_not_share_the_folder_have_none(gloo: GlooPool, whole: list[RunRecord], tmp_path: Path) -> None:
    gloo.run(2, attempt, str(tmp_path), {}, fails=6, machines=True)
    assert not list((tmp_path / "local").glob("*/titan-*"))
    records = gloo.run(2, attempt, str(tmp_path), {}, restart=True, machines=True)
    assert [record.losses for record in records] == [one.losses[3:] for one in whole]


@pytest.mark.full
def test_on_one_machine_another_mesh_resumes_from_it(gloo: GlooPool, whole: list[RunRecord], tmp_path: Path) -> None:
    gloo.run(2, attempt, str(tmp_path), {}, fails=6)
    (record,) = gloo.run(1, attempt, str(tmp_path), {}, restart=True)
    assert record.losses == pytest.approx(whole[0].losses[5:], rel=1e-5)


def folders() -> list[Path]:
    """Run three steps, of which the third fails; return the local folders."""
    settings = {**TINY, "checkpoint.enable": "true", "checkpoint.local_interval": 1, "checkpoint.local_folder": "local"}
    with pytest.raises(RuntimeError, match="a fault"):
        run_recipe("tiny", settings, observers=[Fails(3)])
    return sorted(Path("local").glob("titan-*"))


def test_the_folder_is_private_and_its_name_random(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = folders()
    (second,) = folders()  # which removed the first
    assert second.stat().st_mode & 0o077 == 0
    assert len(second.name) == len("titan-") + 32 and second != first
    monkeypatch.setenv(RESTART, "{}")
    assert folders() == [second]


def test_a_folder_that_others_can_write_to_is_refused(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder,) = folders()
    folder.chmod(0o777)
    monkeypatch.setenv(RESTART, "{}")
    with pytest.raises(UserError, match=r"checkpoint\.local_folder = 'local'.*others can write to it"):
        folders()
    monkeypatch.delenv(RESTART)
    assert len(folders()) == 2  # a new one; the other may be somebody else's by now


def test_a_new_folder_is_nobody_elses(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_ckpt.local_checkpoints.secrets.token_hex", lambda size: "0" * 2 * size)
    Path("local", f"titan-{'0' * 32}").mkdir(parents=True)
    with pytest.raises(UserError, match="File exists"):
        folders()
