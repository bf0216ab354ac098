"""Parameters that other formats store transposed, in rows of a common tensor or in several tensors are read and written
exactly, and the format is chosen by priority."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from harness import packed
from titan_ckpt.foreign.arrangement import by_name, read, shape_in, their_shapes, write
from titan_ckpt.foreign.checks import declared_tensors
from titan_ckpt.foreign.config import formats_of, model_for, preferred
from titan_core.api import ForeignTensor, Model, Ref, UserError
from titan_core.cli.main import main

HEAD = 3


class InMemory:
    """Foreign files, whose elements are all different, and what was read of them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.elements = tensors, 0

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str, split: int | None = None) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> str:
        return "float32"

    def read(self, name: str, box: tuple[slice, ...], split: int | None = None) -> Tensor:
        self.elements += self.tensors[name][box].numel()
        return self.tensors[name][box]


def numbered(*shape: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


PARTS = {"x": numbered(8, 5), "y": numbered(4, 5, first=100), "z": numbered(12, 5, first=200)}
INTERLEAVED = numbered(4 * 3 * HEAD, 7)
EXPERTS = {f"{part}.{index}": numbered(4, 6, first=100 * index + (50 if part == "up" else 0))
           for index in range(3) for part in ("gate", "up")}  # fmt: skip

ARRANGED: dict[str, tuple[ForeignTensor, Mapping[str, Tensor], Tensor]] = {
    "as it is": (ForeignTensor("w", "w"), {"w": numbered(6, 4)}, numbered(6, 4)),
    "scalar": (ForeignTensor("w", "w"), {"w": torch.tensor(3.0)}, torch.tensor(3.0)),
    "transposed": (ForeignTensor("w", "w", transpose=True), {"w": numbered(6, 4)}, numbered(6, 4).T),
    "transposed experts": (
        ForeignTensor("w", "w", transpose=True), {"w": numbered(2, 6, 4)}, numbered(2, 6, 4).transpose(1, 2)
    ),
    "other order": (
        ForeignTensor("w", "w", rows=(2, 0, 1, 3)), {"w": numbered(8, 3)}, numbered(8, 3)[[2, 0, 1, 3, 6, 4, 5, 7]]
    ),
    "keys beside queries": (
        ForeignTensor("w", "w", rows=range(8, 12), row_block=16), {"w": numbered(16, 3)}, numbered(16, 3)[8:12]
    ),
    "keys of each head": (
        ForeignTensor("w", "w", rows=range(HEAD, 2 * HEAD), row_block=3 * HEAD), {"w": INTERLEAVED},
        INTERLEAVED.view(4, 3, HEAD, 7)[:, 1].flatten(0, 1),
    ),
    "transposed keys": (
        ForeignTensor("w", "w", rows=range(8, 12), row_block=16, transpose=True), {"w": numbered(3, 16)},
        numbered(3, 16)[:, 8:12].T,
    ),
    "side by side": (
        ForeignTensor("*", "w", pieces=(("x", 8), ("y", 4), ("z", 12))), PARTS, torch.cat(list(PARTS.values()))
    ),
    "experts": (
        ForeignTensor("*", "w", pieces=tuple((name, 4) for name in EXPERTS)), EXPERTS,
        torch.stack([torch.cat([EXPERTS[f"gate.{index}"], EXPERTS[f"up.{index}"]]) for index in range(3)]),
    ),
    "transposed gates of experts with their other half": (
        ForeignTensor("*", "w", pieces=tuple((name, 3) for name in EXPERTS), rows=range(3), row_block=6, transpose=True),
        EXPERTS, torch.stack([tensor.T[:3] for tensor in EXPERTS.values()]),
    ),
    "biases of experts": (
        ForeignTensor("*", "w", pieces=(("x", 5), ("y", 5))), {"x": numbered(5), "y": numbered(5)}, numbered(5).expand(2, 5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRANGED)
def test_every_part_of_a_parameter_is_read_from_hardly_more_than_its_bytes(name: str) -> None:
    tensor, stored, ours = ARRANGED[name]
    files = InMemory(stored)
    assert {one: files.shape(one) for one in tensor.names} == their_shapes(tensor, ours.shape)
    assert torch.Size(shape_in(files, tensor)).numel() == ours.numel()
    assert torch.equal(read(files, tensor, ours.shape), ours)
    ranges = [[(first, stop) for first in range(size) for stop in range(first, size + 1)] for size in ours.shape]
    for box in list(itertools.product(*ranges))[:: 1 + ours.dim() ** 3]:
        offsets, lengths = [first for first, _ in box], [stop - first for first, stop in box]
        files.elements = 0
        part = read(files, tensor, ours.shape, offsets, lengths)
        assert torch.equal(part, ours[tuple(slice(first, stop) for first, stop in box)]), box
        assert files.elements == part.numel() or tensor.rows
        assert files.elements <= max(4, 2 * tensor.block) * part.numel()


@pytest.mark.parametrize("name", ARRANGED)
def test_writing_undoes_reading(name: str) -> None:
    tensor, stored, ours = ARRANGED[name]
    missing = [row for row in range(tensor.block) if row not in tensor.rows]
    rest = replace(tensor, parameter="rest", rows=missing, row_block=tensor.block,
                   pieces=tuple((one, len(missing)) for one, _ in tensor.pieces))  # fmt: skip
    shape = list(ours.shape)
    if missing:
        axis = 1 if tensor.pieces else 0
        shape[axis] = shape[axis] // len(tensor.rows) * len(missing)
    others = {"w": ours, "rest": read(InMemory(stored), rest, shape) if missing else None}
    for foreign, sources in by_name([tensor, rest] if missing else [tensor]).items():
        assert torch.equal(write(foreign, sources, lambda parameter: others[parameter]), stored[foreign])  # type: ignore[arg-type, return-value]


def test_far_rows_are_read_apart() -> None:
    files = InMemory({"w": numbered(4 * 300, 2)})
    tensor = ForeignTensor("w", "w", rows=range(100), row_block=300)
    assert torch.equal(read(files, tensor, (400, 2)), files.tensors["w"].view(4, 300, 2)[:, :100].flatten(0, 1))
    assert files.elements == 800


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([ForeignTensor("w", "a", rows=range(2), row_block=4), ForeignTensor("w", "b", rows=range(1, 4), row_block=4)],
         "declares w twice"),
        ([ForeignTensor("w", "a", rows=range(2), row_block=4), ForeignTensor("w", "b", rows=(2, 3), row_block=5)],
         "declares w twice"),
        ([ForeignTensor("w", "a"), ForeignTensor("*", "b", pieces=(("v", 1), ("w", 1)))], "declares w twice"),
        ([ForeignTensor("w", "a", rows=range(3), row_block=4)], "declares 3 of each 4 rows of w"),
        ([ForeignTensor("w", "a", aliases=("x",)), ForeignTensor("v", "b", aliases=("x",))], "declares x twice"),
        ([ForeignTensor("w", "a"), ForeignTensor("v", "a")], "declares a twice"),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_would_be_lost_are_refused(tensors: list[ForeignTensor], message: str) -> None:
    ref = SimpleNamespace(call_list=lambda kind, args: tensors, origin=None)
    form: Any = SimpleNamespace(files="safetensors", tensors=ref)
    with pytest.raises(UserError, match=f"model 'm', format 'safetensors'.*{message}"):
        declared_tensors(form, packed.ARGS, "m")


def test_parameters_that_share_a_tensor_share_its_aliases() -> None:
    fused = [
        ForeignTensor("w", name, rows=range(2 * n, 2 * n + 2), row_block=4, aliases=("x",)) for n, name in enumerate("ab")
    ]
    ref = SimpleNamespace(call_list=lambda kind, args: fused, origin=None)
    form: Any = SimpleNamespace(files="safetensors", tensors=ref)
    assert declared_tensors(form, packed.ARGS, "m") == fused


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        (ForeignTensor("w", "a", rows=range(3)), (8, 2)),
        (ForeignTensor("w", "a", transpose=True), (8,)),
        (ForeignTensor("w", "a", pieces=(("x", 3), ("y", 4))), (8, 2)),
        (ForeignTensor("w", "a", pieces=(("x", 3), ("y", 4))), (8,)),
    ],
    ids=str,
)
def test_a_declaration_that_does_not_fit_the_parameter_is_refused(tensor: ForeignTensor, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        UserError, match=r"w \(a\).*declares pieces, rows or a transpose that a parameter of shape .* cannot"
    ):
        their_shapes(tensor, shape)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": (0, 0)}, "must be different rows of a block of 2"),
        ({"rows": (0, 5), "row_block": 4}, "must be different rows of a block of 4"),
        ({"pieces": (("x", 1), ("x", 1))}, "has the same piece twice"),
        ({"pieces": (("x", 1),), "aliases": ("y",)}, "or aliases"),
    ],
    ids=str,
)
def test_a_tensor_that_contradicts_itself_cannot_be_declared(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForeignTensor("w", "a", **fields)


ARGS = packed.ARGS


def test_a_conversion_there_and_back_keeps_every_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = packed.write_packed(Path("theirs"))
    assert main(["checkpoint", "convert", "theirs", "ours"]) == 0
    assert main(["checkpoint", "convert", "ours", "back"]) == 0
    back = load_file("back/model.safetensors")
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())
    assert main(["checkpoint", "convert", "theirs", "half", "--dtype", "bfloat16"]) == 0
    assert main(["checkpoint", "convert", "half", "back-half", "--dtype", "float16"]) == 0
    kept = {name: tensor.dtype for name, tensor in load_file("back-half/model.safetensors").items()}
    buffers = {name for name in expected if name.endswith("score_correction")}
    assert {name for name, dtype in kept.items() if dtype == torch.float32} == buffers
    assert {dtype for name, dtype in kept.items() if name not in buffers} == {torch.float16}


def registry(*priorities: int, files: str = "safetensors") -> Any:
    """Return a registry in which several models accept the same config file."""
    models = [
        Model(
            name=f"m{number}", summary="", flavors={"tiny": ARGS}, define=Ref("titan_testing.tiny:define"),
            formats=(replace(packed.FORMAT, priority=priority, files=files),),
        )
        for number, priority in enumerate(priorities)
    ]  # fmt: skip
    return SimpleNamespace(all=lambda kind: models)


def chosen(found: Any, wanted: str | None = None) -> str:
    model, _, args = model_for("safetensors", packed.from_args(ARGS), found, wanted, Path("folder"))
    assert args == ARGS
    return model.name


def test_the_format_of_the_highest_priority_is_used_and_a_tie_names_both() -> None:
    assert chosen(registry(0)) == "m0"
    assert chosen(registry(-1, 0)) == chosen(registry(0, 5, 3)) == "m1"
    message = (
        r"folder/config.json.*two formats have priority 2 for these weights: harness.packed:tensors of model 'm0' and "
        r"harness.packed:tensors of model 'm2'"
    )
    with pytest.raises(UserError, match=message):
        chosen(registry(2, 1, 2))
    assert chosen(registry(2, 1, 2), wanted="m2") == "m2"
    (model,) = registry(0).all(Model)
    with pytest.raises(UserError, match=r"model 'm0'.*two formats have priority 0"):
        preferred(model, formats_of(replace(model, formats=2 * model.formats), "safetensors"))


def test_files_that_no_reader_knows_are_refused_with_the_list() -> None:
    message = "declares weights in files 'gguf', but titan-ckpt reads only safetensors, consolidated, dcp"
    with pytest.raises(UserError, match=message):
        chosen(registry(0, files="gguf"))
    with pytest.raises(UserError, match=f"model 'm0'.*{message}.*WeightFormat.files"):
        formats_of(registry(0, files="gguf").all(Model)[0], "safetensors")
