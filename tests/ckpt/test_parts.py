"""The steps of saving and restoring, each on its own, with a deterministic order of events."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.one_of_many import OneOfMany
from titan_ckpt.contents.state import generator_states, restore_generators
from titan_ckpt.contents.tensors import model_tensors
from titan_ckpt.format.chunks import read_whole
from titan_ckpt.format.folder import Folder, write_all
from titan_ckpt.format.index import write_index
from titan_ckpt.format.manifest import read_manifest, verify_data
from titan_ckpt.format.reader import Reader
from titan_ckpt.format.stored import NAME, UNFINISHED, BrokenCheckpoint, chunk_digest, data_file
from titan_ckpt.format.writer import Writer
from titan_core.api import ModelPart

WORLD = OneOfMany({"dp_shard": 4}, at={"dp_shard": 3})


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
    saved = json.dumps(generator_states(WORLD))
    assert (len(saved) < 100) == (not drawn_before)
    states = json.loads(saved)
    drawn = [(random.random(), random.gauss(0, 1), torch.rand(3).tolist()) for _ in range(2)]
    restore_generators(states, WORLD)
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
    before = generator_states(WORLD)
    try:
        with pytest.raises(ValueError, match="the state of a random generator is damaged"):
            restore_generators(states, WORLD)
    finally:
        restore_generators(before, WORLD)


def divided(folder: Path) -> tuple[Folder, Any]:
    """Return a checkpoint whose only tensor is divided between two files, and the contents of its manifest."""
    target = saved(folder, {"model.w": torch.arange(8.0).view(4, 2)})
    contents = json.loads((folder / "step-3" / NAME).read_text())["checkpoint"]
    data = (folder / "step-3" / "data-00000.bin").read_bytes()
    for rank in (0, 1):
        part = data[16 * rank : 16 * (rank + 1)]
        digest = chunk_digest("model.w", "float32", (2 * rank, 0), (2, 2), part)
        with target.create(data_file(rank)) as file:
            write_all(file, memoryview(part))
            contents["files"][data_file(rank)] = write_index(file, {"model.w": (0, digest)}, 16)
    contents["layouts"] = [{"cuts": [[[0, 2, 3]], [[0, 2, 2]]], "files": [[0, 1, 2]]}]
    return target, contents


def rewritten(folder: Folder, contents: Any) -> None:
    from benchmarks.fuzz.checkpoints import _write

    _write(Path(folder.url), contents)


def test_pieces_that_cover_a_tensor_are_accepted(tmp_path: Path) -> None:
    folder, contents = divided(tmp_path)
    rewritten(folder, contents)
    manifest = read_manifest(folder)
    assert sum(verify_data(folder, manifest)) == 32
    loaded = torch.zeros(4, 2)
    Reader(folder, manifest).load({"model.w": loaded})
    assert torch.equal(loaded, torch.arange(8.0).view(4, 2)) and torch.equal(read_whole(folder, manifest, "model.w"), loaded)


CONTRADICTIONS: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], str]] = {
    "no piece": (lambda m, c: c["files"].clear(), "a layout has another number of files than of pieces"),
    "a hole": (lambda m, c: c["files"][0].__setitem__(2, 1), "a layout has another number of files than of pieces"),
    "twice": (lambda m, c: c["files"][0].__setitem__(1, 0), "a layout has several pieces in a file"),
    "an overlap": (lambda m, c: c["cuts"][0].append([3, 0, 1]), "more pieces of tensors than the indexes of its files"),
    "a later begin": (lambda m, c: c["cuts"][0][0].__setitem__(0, 2), "a layout has a dimension that pieces do not cover"),
    "backwards": (lambda m, c: c["cuts"].__setitem__(0, [[0, 0, 1], [4, -2, 2]]), "a layout has a dimension that pieces"),
    "no dimension": (lambda m, c: c["cuts"][0].clear(), "a layout has a dimension that pieces do not cover once"),
    "below zero": (lambda m, c: c["cuts"][0].append([-8, 1, 1]), "a layout has a run [first, step, count] out of bounds"),
    "beyond": (lambda m, c: c["cuts"][0][0].__setitem__(1, 1 << 62), "run [first, step, count] out of bounds"),
    "endless": (lambda m, c: c["files"].__setitem__(0, [0, 1, 1 << 62]), "more pieces of tensors than the indexes"),
    "endless cuts": (lambda m, c: c["cuts"].__setitem__(0, [[0, 1, 1 << 62]]), "more pieces of tensors than the indexes"),
    "more dimensions": (lambda m, c: c["cuts"].extend([[[0, 1, 2]]] * 70), "layouts.0.cuts: List should have at most 64"),
    "another rank": (lambda m, c: c["files"].__setitem__(0, [1, 1, 2]), "data-00002.bin, which the checkpoint"),
    "another layout": (lambda m, c: m["tensors"].__setitem__("model.w", ["float32", 1]), "a layout that it does not list"),
    "a layout before": (lambda m, c: m["tensors"].__setitem__("model.w", ["float32", -1]), "a layout that it does not list"),
    "unused": (lambda m, c: m["layouts"].append(c), "more pieces of tensors than the indexes"),
    "absolute": (lambda m, c: m["files"].__setitem__("/etc/passwd", [1, 1, ""]), "is not the name of a data file"),
    "parent": (lambda m, c: m["files"].__setitem__("../data-00000.bin", [1, 1, ""]), "is not the name of a data file"),
    "type": (lambda m, c: m["tensors"].__setitem__("model.w", ["float99", 0]), "unknown dtype 'float99'"),
    "size": (lambda m, c: m["files"].__setitem__("data-00001.bin", [16, 900, ""]), "data-00001.bin has"),
    "step": (lambda m, c: m.__setitem__("step", -1), "step: Input should be"),
    "text": (lambda m, c: c["files"][0].__setitem__(0, "0"), "layouts.0.files.0.0: Input should be a valid integer"),
    "true": (lambda m, c: c["files"][0].__setitem__(0, False), "layouts.0.files.0.0: Input should be a valid integer"),
    "state": (lambda m, c: m.__setitem__("state", {"step": 3}), "state"),
    "about": (lambda m, c: m.__setitem__("about", {"mesh": []}), "about.mesh"),
    "created": (lambda m, c: m.__setitem__("created", "yesterday"), "created"),
    "more": (lambda m, c: m.__setitem__("more", 1), "more"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_broken(tmp_path: Path, kind: str) -> None:
    folder, contents = divided(tmp_path)
    change, message = CONTRADICTIONS[kind]
    change(contents, contents["layouts"][0])
    rewritten(folder, contents)
    with pytest.raises(BrokenCheckpoint, match=re.escape(message)):
        read_manifest(folder)


INDEXES: dict[str, tuple[str, str]] = {
    "of another tensor": ('{"model.w":[0,"0"],"model.v":[0,"0"]}', "has pieces of other tensors"),
    "of no tensor": ("{}", "should have a piece of model.w, which its index does not list"),
    "later": ('{"model.w":[4,"0"]}', "has bytes that belong to no piece, from byte 0 on"),
    "a wrong checksum": ('{"model.w":[0,"0"]}', "is damaged in model.w: its checksum does not match"),
    "below zero": ('{"model.w":[-4,"0"]}', "its index has values of the wrong type"),
    "true": ('{"model.w":[true,"0"]}', "its index has values of the wrong type"),
    "a list": ("[]", "its index is not the JSON of one"),
    "text": ('{"model.w":0', "its index is not the JSON of one"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_that_contradicts_the_manifest_is_broken(tmp_path: Path, kind: str) -> None:
    folder, contents = divided(tmp_path)
    text, message = INDEXES[kind]
    data = (tmp_path / "step-3/data-00000.bin").read_bytes()[:16]
    (tmp_path / "step-3/data-00000.bin").write_bytes(data + text.ljust(128).encode())
    contents["files"]["data-00000.bin"] = [16, 128, hashlib.sha256(text.ljust(128).encode()).hexdigest()]
    rewritten(folder, contents)
    manifest = read_manifest(folder)
    with pytest.raises(BrokenCheckpoint, match=re.escape(message)):
        list(verify_data(folder, manifest))
    if "other tensors" not in message:
        with pytest.raises(BrokenCheckpoint, match=r"data-00000\.bin"):
            Reader(folder, manifest).load({"model.w": torch.zeros(4, 2)})


def test_swapped_pieces_are_detected(tmp_path: Path) -> None:
    folder, contents = divided(tmp_path)
    contents["layouts"][0]["files"] = [[1, -1, 2]]
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
