"""The compiler's results survive a restart. A file that cannot be used costs only time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from titan_core.toolkit.device import device_name
from titan_parallel.compile import FOLDER, CompileCache, UnusableCache, observe, read, write
from titan_parallel.config import CompileSection
from titan_testing.jobs import run_recipe

DEVICE = device_name(torch.device("cpu"))


class Compiler:
    """Stands in for torch's cache: the code of a run is the content that it made or loaded."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.made = b"code"

    def save(self) -> tuple[bytes, Any]:
        return self.made, SimpleNamespace(artifacts={"inductor": [self.made.hex()]})

    def load(self, artifacts: bytes) -> Any:
        if artifacts == b"unreadable":
            raise KeyError("artifact")
        self.loaded.append(artifacts)
        return SimpleNamespace(artifacts={"inductor": [artifacts.hex()]})


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    fake = Compiler()
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", fake.save)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", fake.load)
    return fake


def run(folder: Path, rank: int = 0, stages: int = 1, ranks: int = 1, validates: bool = False) -> None:
    """Call the cache as a run of two steps does."""
    dims = [SimpleNamespace(name="pp", divides="layers"), SimpleNamespace(name="dp", divides="batch")]
    plan = SimpleNamespace(dims=dims, degrees={"pp": stages, "dp": ranks // stages})
    places = [rank * stages // ranks for rank in range(ranks)]

    def gather(name: str) -> list[str]:
        return [name.replace(f"pp{places[rank]}", f"pp{place}") for place in places]

    world = SimpleNamespace(
        rank=rank, device=torch.device("cpu"), plan=plan, coordinate=lambda dim: places[rank], gather=gather
    )
    cache = CompileCache()
    cache.titan_train_start(cast(Any, SimpleNamespace(world=world, dump_folder=str(folder))))
    for _ in range(2):
        cache.titan_step_end(cast(Any, None))
        if validates:
            cache.titan_validation_end(cast(Any, None))


def file_of(folder: Path) -> Path:
    (path,) = (folder / FOLDER).iterdir()
    return path


def test_a_second_run_loads_what_the_first_has_compiled(tmp_path: Path, compiler: Compiler) -> None:
    run(tmp_path)
    assert compiler.loaded == []
    assert file_of(tmp_path).name == "cpu0.bin"
    before = file_of(tmp_path).stat()
    run(tmp_path)
    assert compiler.loaded == [b"code"]
    assert file_of(tmp_path).stat().st_mtime_ns == before.st_mtime_ns  # nothing is new
    compiler.made = b"other code"
    run(tmp_path)
    run(tmp_path)
    assert compiler.loaded == [b"code", b"code", b"other code"]


def test_the_code_of_validation_is_saved_too(tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([b"training", b"training and validation"])
    monkeypatch.setattr(compiler, "save", lambda: Compiler.save(cast(Any, SimpleNamespace(made=next(made)))))
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: compiler.save())
    run(tmp_path, validates=True)
    assert read(file_of(tmp_path), DEVICE) == b"training and validation"


def test_stages_have_files_of_their_own_and_each_has_one_writer(tmp_path: Path, compiler: Compiler) -> None:
    written = []
    for rank in range(4):
        (tmp_path / str(rank)).mkdir()
        run(tmp_path / str(rank), rank, stages=2, ranks=4)
        written.append([path.name for path in tmp_path.glob(f"{rank}/*/*")])
    assert written == [["pp0-cpu0.bin"], [], ["pp1-cpu0.bin"], []]


def test_a_job_keeps_its_compiled_code(in_tmp: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    # The cache is inductor's, which takes seconds to compile.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    keys = {"training.steps": 1, "compile.enable": "true", "compile.components": '["loss"]', "job.dump_folder": "run"}
    run_recipe("tiny", {**keys, "job.device": "cpu"})
    assert read(file_of(Path("run")), DEVICE) == b"code"


@pytest.mark.parametrize("section", [CompileSection(cache=False), CompileSection(backend="eager")], ids=str)
def test_it_can_be_switched_off(section: CompileSection) -> None:
    observer = observe([], cast(Any, SimpleNamespace(section=section)))
    assert not isinstance(observer, CompileCache)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "no header": lambda data: b"\xff" * 10_000,
    "a list": lambda data: b"[]\ncode",
    "another torch": lambda data: data.replace(torch.__version__.encode(), b"1.0"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_cannot_be_used_is_reported_and_replaced(
    tmp_path: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    run(tmp_path)
    whole = file_of(tmp_path).read_bytes()
    file_of(tmp_path).write_bytes(DAMAGE[damage](whole))
    run(tmp_path)
    (line,) = caplog.messages
    why = "it was compiled with torch = 1.0, and this is" if damage == "another torch" else "it is damaged"
    assert line.startswith(f"{file_of(tmp_path)} is not used, so everything is compiled again: {why}")
    assert compiler.loaded == []
    assert file_of(tmp_path).read_bytes() == whole


def test_artifacts_that_torch_refuses_end_no_run(
    tmp_path: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.made = b"unreadable"
    run(tmp_path)
    run(tmp_path)
    assert "torch cannot load it (KeyError: 'artifact')" in caplog.text


def test_code_that_others_may_have_written_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / FOLDER / "cpu0.bin"
    write(path, "CPU", b"code")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read(path, "CPU") == b"code"
    with pytest.raises(UnusableCache, match="device = CPU, and this is GPU"):
        read(path, "GPU")
    path.chmod(0o620)
    with pytest.raises(UnusableCache, match="another user may have written it"):
        read(path, "CPU")
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnusableCache, match="another user may have written it"):
        read(path, "CPU")


def test_a_folder_that_cannot_be_written_ends_no_run(
    tmp_path: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    run(tmp_path)
    assert f"compiled code cannot be saved in {tmp_path / FOLDER / 'cpu0.bin'}: File exists" in caplog.text
