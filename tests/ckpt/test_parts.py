"""The parts of a save and of a restore, each by itself, in an order of events that is the same each time."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from harness.jobs import make_job
from titan_ckpt import rng, saving, writer
from titan_ckpt.config import CheckpointSection
from titan_ckpt.folder import Folder
from titan_ckpt.manifest import read_manifest, verify_data
from titan_ckpt.reader import Reader
from titan_ckpt.saving import Saving
from titan_ckpt.staging import Staging
from titan_ckpt.stored import NAME, UNFINISHED, BrokenCheckpoint, chunk_digest
from titan_ckpt.tensors import model_tensors
from titan_ckpt.writer import Writer
from titan_core.api.hookspecs import hookimpl
from titan_core.api.model_part import ModelPart
from titan_core.train import trainer

CPU = torch.device("cpu")


class Model(nn.Module):
    """A parameter, a buffer that is part of its state, and one that is not."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 2), value))
        self.register_buffer("mean", torch.full((3,), value))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("table", torch.full((2,), value), persistent=False)


def part(value: float) -> ModelPart:
    return ModelPart(Model(value), None, None)  # type: ignore[arg-type]


def saved(folder: Path, tensors: dict[str, Tensor]) -> Folder:
    target = Folder(str(folder / "step-3"))
    save(tensors, storage_writer=Writer(target, 0, 3, {}, {}), no_dist=True)
    return target


def test_buffers_that_are_part_of_a_models_state_are_saved_and_restored(tmp_path: Path) -> None:
    folder = saved(tmp_path, model_tensors([part(5.0)]))
    other = part(0.0)
    load(model_tensors([other]), storage_reader=Reader(folder, read_manifest(folder)), no_dist=True)
    state = {name: tensor.flatten()[0].item() for name, tensor in other.module.state_dict().items()}
    assert state == {"weight": 5.0, "mean": 5.0, "count": 5}
    assert other.module.get_buffer("table")[0] == 0.0
    assert UNFINISHED not in folder.list()


def test_random_generators_continue_from_where_they_were() -> None:
    states = json.loads(json.dumps(rng.collect(CPU)))
    drawn = [(random.random(), random.gauss(0, 1), torch.rand(3).tolist()) for _ in range(2)]
    rng.apply(states, CPU)
    assert [(random.random(), random.gauss(0, 1), torch.rand(3).tolist()) for _ in range(2)] == drawn


@pytest.mark.parametrize(
    "states",
    [
        {"python": [3, ["x"], None], "cpu": ""}, {"python": [3, [1] * 625, "x"], "cpu": ""}, {"python": [3], "cpu": ""},
        {"python": [3, [1] * 625, None], "cpu": "no base64"}, {"python": [3, [1] * 625, None], "cpu": "AAAA"},
    ],
    ids=lambda states: str(states)[:40],
)  # fmt: skip
def test_damaged_generators_are_refused(states: dict[str, Any]) -> None:
    before = rng.collect(CPU)
    try:
        with pytest.raises(ValueError, match="a random generator's state is damaged"):
            rng.apply(states, CPU)
    finally:
        rng.apply(before, CPU)


def test_a_copy_stays_what_it_was_while_the_original_changes() -> None:
    tensors = {"a": torch.ones(5), "b": torch.ones(2, 2).t()}
    staging = Staging(CPU, pinned=False)
    copies = staging.copy(tensors)
    for tensor in tensors.values():
        tensor.fill_(7)
    assert all(torch.equal(copy, torch.ones_like(copy)) for copy in copies.values())
    again = staging.copy(tensors)
    assert {name: copy.data_ptr() for name, copy in again.items()} == {
        name: copy.data_ptr() for name, copy in copies.items()
    }
    assert all(copy.unique().tolist() == [7] for copy in again.values())


class Gate:
    """Holds a thread until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.reached.set()
            assert self.open.wait(60)
            return function(*arguments, **keywords)

        return call


BESIDE: dict[str, object] = {
    "model.args": "{dim = 16, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 16}",
    "training.seq_len": 8,
    "training.local_batch_size": 1,
    "training.steps": 3,
    "checkpoint.enable": "true",
    "checkpoint.interval": 1,
    "checkpoint.async_mode": "async",
    "job.device": "cpu",
    "job.dump_folder": "run",
}


class Weights:
    """The weights after each step, as the training thread sees them."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, Tensor]] = {}

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.parts = run.parts

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        self.after[report.step] = {name: one.clone() for name, one in model_tensors(self.parts).items()}


def weights_of(step: int) -> dict[str, Tensor]:
    from titan_ckpt.convert import read_whole

    folder = Folder(f"run/checkpoint/step-{step}")
    manifest = read_manifest(folder)
    return {name: read_whole(folder, manifest, name) for name in manifest.tensors if name.startswith("model.")}


def test_an_update_waits_for_the_copy_and_not_for_the_disk(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of step 1 is held until training waits for it; what is written is held until step 2 is trained."""
    copying, writing, weights, waited = Gate(), Gate(), Weights(), []
    monkeypatch.setattr(Staging, "copy", copying.before(Staging.copy))
    monkeypatch.setattr(writer, "bytes_of", writing.before(writer.bytes_of))
    original = saving.Saving.wait_for_copy

    def wait_for_copy(self: Saving) -> None:
        if self._pending is not None and not waited:
            assert copying.reached.wait(60)
            assert not self._copied.is_set()
            waited.append(self._pending[0])
            copying.open.set()  # only now: who does not wait has gone on by then
            original(self)
            assert self._copied.is_set()
            return
        original(self)

    class Opens(Weights):
        @hookimpl
        def titan_step_end(self, report: Any) -> None:
            super().titan_step_end(report)
            if report.step == 2:
                assert writing.reached.wait(60)
                writing.open.set()

    weights = Opens()
    monkeypatch.setattr(saving.Saving, "wait_for_copy", wait_for_copy)
    trainer.train(make_job("tiny", BESIDE), [weights])
    assert waited == [1]
    assert not torch.equal(*(weights.after[step]["model.norm.weight"] for step in (1, 2)))
    for step in (1, 2, 3):
        for name, tensor in weights_of(step).items():
            assert torch.equal(tensor, weights.after[step][name]), (step, name)


def divided(folder: Path) -> tuple[Folder, Any]:
    """A checkpoint whose only tensor has two chunks, and its manifest's contents."""
    target = saved(folder, {"model.w": torch.arange(8.0).view(4, 2)})
    contents = json.loads((folder / "step-3" / NAME).read_text())["checkpoint"]
    data = (folder / "step-3" / "data-00000.bin").read_bytes()
    contents["tensors"]["model.w"]["chunks"] = [
        [
            [row, 0],
            [2, 2],
            "data-00000.bin",
            at,
            16,
            chunk_digest("model.w", "float32", (row, 0), (2, 2), data[at : at + 16]),
        ]
        for row, at in ((0, 0), (2, 16))
    ]
    return target, contents


def rewritten(folder: Folder, contents: Any) -> None:
    from benchmarks.fuzz.checkpoints import _write

    _write(Path(folder.url), contents)


def test_chunks_that_cover_a_tensor_are_whole(tmp_path: Path) -> None:
    folder, contents = divided(tmp_path)
    rewritten(folder, contents)
    assert sum(verify_data(folder, read_manifest(folder))) == 32


CONTRADICTIONS: dict[str, tuple[Callable[[Any, list[Any]], Any], str]] = {
    "no chunk": (lambda m, c: c.clear(), "model.w is not whole: its chunks have 0 of 8 elements"),
    "a hole": (lambda m, c: c.pop(), "model.w is not whole: its chunks have 4 of 8 elements"),
    "twice": (lambda m, c: c.append(c[0]), "has chunks that overlap"),
    "overlap": (lambda m, c: c[1].__setitem__(0, [1, 0]), "has chunks that overlap"),
    "outside": (lambda m, c: c[1].__setitem__(0, [3, 0]), "lies outside of it"),
    "another rank": (lambda m, c: c[1].__setitem__(0, [2]), "lies outside of it"),
    "bytes": (lambda m, c: c[1].__setitem__(4, 12), "has 12 bytes, which float32"),
    "start": (lambda m, c: c[1].__setitem__(3, 8), "has bytes from"),
    "beyond": (lambda m, c: c[1].__setitem__(3, 1 << 40), "has bytes from"),
    "up": (lambda m, c: c[1].__setitem__(2, "../data-00000.bin"), "which the checkpoint does not list"),
    "absolute": (lambda m, c: m.__setitem__("files", {"/etc/passwd": 32}), "is not the name of a data file"),
    "parent": (lambda m, c: m.__setitem__("files", {"../data-00000.bin": 32}), "is not the name of a data file"),
    "type": (lambda m, c: m["tensors"]["model.w"].__setitem__("dtype", "float99"), "unknown type 'float99'"),
    "size": (lambda m, c: m["tensors"]["model.w"].__setitem__("dtype", "float64"), "has 16 bytes, which float64"),
    "shape": (lambda m, c: m["tensors"]["model.w"].__setitem__("shape", [8, 2]), "is not whole"),
    "step": (lambda m, c: m.__setitem__("step", -1), "step: Input should be"),
    "text": (lambda m, c: c[0].__setitem__(3, "0"), "is not as chunks are"),
    "true": (lambda m, c: c[0].__setitem__(3, False), "is not as chunks are"),
    "state": (lambda m, c: m.__setitem__("state", {"step": 3}), "state"),
    "about": (lambda m, c: m.__setitem__("about", {"mesh": []}), "about.mesh"),
    "created": (lambda m, c: m.__setitem__("created", "yesterday"), "created"),
    "more": (lambda m, c: m.__setitem__("more", 1), "more"),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_broken(tmp_path: Path, kind: str) -> None:
    folder, contents = divided(tmp_path)
    change, told = CONTRADICTIONS[kind]
    change(contents, contents["tensors"]["model.w"]["chunks"])
    rewritten(folder, contents)
    with pytest.raises(BrokenCheckpoint, match=told.replace(".", r"\.")):
        read_manifest(folder)


def test_chunks_in_each_others_places_are_damaged(tmp_path: Path) -> None:
    folder, contents = divided(tmp_path)
    first, second = contents["tensors"]["model.w"]["chunks"]
    first[0], second[0] = second[0], first[0]
    rewritten(folder, contents)
    with pytest.raises(BrokenCheckpoint, match=r"is damaged in model\.w"):
        list(verify_data(folder, read_manifest(folder)))


def test_a_renamed_folder_is_refused(tmp_path: Path) -> None:
    from titan_ckpt.catalogue import entry

    saved(tmp_path, {"model.w": torch.ones(2)})
    (tmp_path / "step-3").rename(tmp_path / "step-30")
    assert (
        "it is the checkpoint of step 3, in a folder named step-30" in entry(Folder(str(tmp_path / "step-30")), 30).problem
    )
    (tmp_path / "step-30").rename(tmp_path / "best")
    assert entry(Folder(str(tmp_path / "best")), 0).manifest is not None


def test_the_default_is_no_save_beside_training() -> None:
    assert CheckpointSection().async_mode == "disabled"
