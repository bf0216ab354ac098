"""The steps of saving and restoring, each on its own, with a deterministic order of events."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_ckpt.contents.state import generator_states, restore_generators
from titan_ckpt.contents.tensors import model_tensors
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import read_manifest, verify_data
from titan_ckpt.format.reader import Reader
from titan_ckpt.format.stored import NAME, UNFINISHED, BrokenCheckpoint, chunk_digest
from titan_ckpt.format.writer import Writer
from titan_core.api import ModelPart

CPU = torch.device("cpu")


class Model(nn.Module):
    """A module with a parameter, persistent buffers and a non-persistent buffer."""

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
    Writer(target, 0, 3, {}, {}).save(tensors)
    return target


def test_persistent_buffers_are_saved_and_restored(tmp_path: Path) -> None:
    folder = saved(tmp_path, model_tensors([part(5.0)]))
    other = part(0.0)
    Reader(folder, read_manifest(folder)).load(model_tensors([other]))
    state = {name: tensor.flatten()[0].item() for name, tensor in other.module.state_dict().items()}
    assert state == {"weight": 5.0, "mean": 5.0, "count": 5}
    assert other.module.get_buffer("table")[0] == 0.0
    assert UNFINISHED not in folder.list()


@pytest.mark.parametrize("drawn_before", [0, 1])
def test_random_generators_continue_after_restoring(drawn_before: int) -> None:
    """The state of those that have only been seeded is their seed."""
    torch.manual_seed(2**63 + 5)
    random.seed(2**63 + 5)
    for _ in range(drawn_before):
        random.gauss(0, 1), torch.rand(1)
    assert (len(json.dumps(generator_states(CPU))) < 100) == (not drawn_before)
    states = json.loads(json.dumps(generator_states(CPU)))
    drawn = [(random.random(), random.gauss(0, 1), torch.rand(3).tolist()) for _ in range(2)]
    restore_generators(states, CPU)
    assert [(random.random(), random.gauss(0, 1), torch.rand(3).tolist()) for _ in range(2)] == drawn


@pytest.mark.parametrize(
    "states",
    [
        {"python": [3, ["x"], None], "cpu": ""}, {"python": [3, [1] * 625, "x"], "cpu": ""}, {"python": [3], "cpu": ""},
        {"python": [3, [1] * 625, None], "cpu": "no base64"}, {"python": [3, [1] * 625, None], "cpu": "AAAA"},
        {"python": 1, "cpu": 2**70},
    ],
    ids=lambda states: str(states)[:40],
)  # fmt: skip
def test_damaged_generators_are_refused(states: dict[str, Any]) -> None:
    before = generator_states(CPU)
    try:
        with pytest.raises(ValueError, match="the state of a random generator is damaged"):
            restore_generators(states, CPU)
    finally:
        restore_generators(before, CPU)


def divided(folder: Path) -> tuple[Folder, Any]:
    """Return a checkpoint whose only tensor has two chunks, and the contents of its manifest."""
    target = saved(folder, {"model.w": torch.arange(8.0).view(4, 2)})
    contents = json.loads((folder / "step-3" / NAME).read_text())["checkpoint"]
    data = (folder / "step-3" / "data-00000.bin").read_bytes()
    chunks = contents["tensors"]["model.w"]["chunks"] = []
    for row, at in ((0, 0), (2, 16)):
        digest = chunk_digest("model.w", "float32", (row, 0), (2, 2), data[at : at + 16])
        chunks.append([[row, 0], [2, 2], "data-00000.bin", at, 16, digest])
    return target, contents


def rewritten(folder: Folder, contents: Any) -> None:
    from benchmarks.fuzz.checkpoints import _write

    _write(Path(folder.url), contents)


def test_chunks_that_cover_a_tensor_are_accepted(tmp_path: Path) -> None:
    folder, contents = divided(tmp_path)
    rewritten(folder, contents)
    assert sum(verify_data(folder, read_manifest(folder))) == 32


CONTRADICTIONS: dict[str, tuple[Callable[[Any, list[Any]], Any], str]] = {
    "no chunk": (lambda m, c: c.clear(), "model.w is incomplete: its chunks cover 0 of 8 elements"),
    "a hole": (lambda m, c: c.pop(), "model.w is incomplete: its chunks cover 4 of 8 elements"),
    "twice": (lambda m, c: c.append(c[0]), "has overlapping chunks"),
    "overlap": (lambda m, c: c[1].__setitem__(0, [1, 0]), "has overlapping chunks"),
    "outside": (lambda m, c: c[1].__setitem__(0, [3, 0]), "has a chunk out of bounds"),
    "another rank": (lambda m, c: c[1].__setitem__(0, [2]), "has a chunk out of bounds"),
    "bytes": (lambda m, c: c[1].__setitem__(4, 12), "has a chunk of 12 bytes, which does not match float32"),
    "start": (lambda m, c: c[1].__setitem__(3, 8), "has bytes that belong to"),
    "beyond": (lambda m, c: c[1].__setitem__(3, 1 << 40), "has bytes that belong to no chunk"),
    "up": (lambda m, c: c[1].__setitem__(2, "../data-00000.bin"), "which the checkpoint does not list"),
    "absolute": (lambda m, c: m.__setitem__("files", {"/etc/passwd": 32}), "is not the name of a data file"),
    "parent": (lambda m, c: m.__setitem__("files", {"../data-00000.bin": 32}), "is not the name of a data file"),
    "type": (lambda m, c: m["tensors"]["model.w"].__setitem__("dtype", "float99"), "unknown dtype 'float99'"),
    "size": (lambda m, c: m["tensors"]["model.w"].__setitem__("dtype", "float64"), "16 bytes, which does not match float64"),
    "shape": (lambda m, c: m["tensors"]["model.w"].__setitem__("shape", [8, 2]), "is incomplete"),
    "step": (lambda m, c: m.__setitem__("step", -1), "step: Input should be"),
    "text": (lambda m, c: c[0].__setitem__(3, "0"), "has values of the wrong type"),
    "true": (lambda m, c: c[0].__setitem__(3, False), "has values of the wrong type"),
    "state": (lambda m, c: m.__setitem__("state", {"step": 3}), "state"),
    "about": (lambda m, c: m.__setitem__("about", {"mesh": []}), "about.mesh"),
    "created": (lambda m, c: m.__setitem__("created", "yesterday"), "created"),
    "more": (lambda m, c: m.__setitem__("more", 1), "more"),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_broken(tmp_path: Path, kind: str) -> None:
    folder, contents = divided(tmp_path)
    change, message = CONTRADICTIONS[kind]
    change(contents, contents["tensors"]["model.w"]["chunks"])
    rewritten(folder, contents)
    with pytest.raises(BrokenCheckpoint, match=message.replace(".", r"\.")):
        read_manifest(folder)


def test_swapped_chunks_are_detected(tmp_path: Path) -> None:
    folder, contents = divided(tmp_path)
    first, second = contents["tensors"]["model.w"]["chunks"]
    first[0], second[0] = second[0], first[0]
    rewritten(folder, contents)
    with pytest.raises(BrokenCheckpoint, match=r"is damaged in model\.w"):
        list(verify_data(folder, read_manifest(folder)))


def test_a_renamed_folder_is_refused(tmp_path: Path) -> None:
    from titan_ckpt.format.catalogue import entry

    saved(tmp_path, {"model.w": torch.ones(2)})
    (tmp_path / "step-3").rename(tmp_path / "step-30")
    problem = entry(Folder(str(tmp_path / "step-30")), 30).problem
    assert "it is the checkpoint of step 3, but its folder is named step-30" in problem
    (tmp_path / "step-30").rename(tmp_path / "best")
    assert entry(Folder(str(tmp_path / "best")), 0).manifest is not None
