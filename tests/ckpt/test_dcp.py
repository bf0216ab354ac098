"""Checkpoints of ``torch.distributed.checkpoint`` (DCP), as TorchTitan writes them, are imported bit for bit. Its tools read
exports."""

from __future__ import annotations

import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from harness.dcp import IMPORT, imported, require_equal, weights, write
from titan_ckpt.foreign import dcp_files
from titan_ckpt.foreign.dcp_metadata import DcpChunk, DcpTensor, read_metadata
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import read_manifest
from titan_core.api import ForeignTensor
from titan_core.cli.main import main
from titan_testing.gloo_pool import GlooPool


def other_state(parameters: dict[str, Tensor]) -> dict[str, Any]:
    """The rest of a TorchTitan run, by its layout of 2025."""
    optimizer: dict[str, Any] = {}
    for name, parameter in parameters.items():
        optimizer |= {f"state.{name}.exp_avg": parameter.clone(), f"state.{name}.step": torch.tensor(7.0)}
        optimizer |= {f"param_groups.{name}.betas": (0.9, 0.95)}
    losses = io.BytesIO()
    torch.save([1.0], losses)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"last_epoch": 7},
        "train_state": {"step": torch.tensor(7, dtype=torch.int32), "global_avg_losses": losses},
        "dataloader": {"dp_rank_0": b"pickled"},
    }


LAYOUTS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Any]], str]] = {
    "weights alone": (lambda state: state, ""),
    "2024": (
        lambda state: {"model": {**state, "layers.0._extra_state": torch.empty(0)}, **other_state(state)},
        "layers.0._extra_state, optimizer (36 entries), lr_scheduler, train_state (2 entries), dataloader",
    ),
    "2025": (
        lambda state: {**state, **other_state(state), "layers.0._extra_state": None},
        "optimizer (36 entries), lr_scheduler, train_state (2 entries), dataloader, layers.0._extra_state",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_of_torchtitan_is_imported_bit_for_bit(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    arranged, left_out = LAYOUTS[layout]
    state = weights()
    state["norm.weight"] = state["norm.weight"].bfloat16()
    write("source", arranged(state))
    assert main(["checkpoint", "convert", "source", "titan", *IMPORT]) == 0
    printed = capsys.readouterr().out
    lines = {line.partition(": ")[0]: line.partition(": ")[2] for line in printed.splitlines()}
    names = lambda text: {name.removeprefix("model.") for name in text.split(", ")}  # noqa: E731
    assert names(lines.get("not imported", "")) == names(left_out)
    require_equal(imported(), state)
    assert read_manifest(Folder("titan")).step == (7 if left_out else 0)


PLACEMENTS: tuple[tuple[Placement, ...], ...] = ((Shard(0),), (Shard(1),), (Replicate(),))


def save_sharded(folder: str) -> None:
    """Save weights that are sharded by FSDP2 and along other dimensions, unevenly."""
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        module = nn.Sequential(OrderedDict(fsdp=nn.Linear(5, 3)))
        for number, parameter in enumerate(module.parameters()):
            nn.init.constant_(parameter, number + 0.5)
        fully_shard(module, mesh=mesh)
        state: dict[str, Any] = dict(module.state_dict())
        for number, placements in enumerate(PLACEMENTS):
            state[f"placed.{number}"] = distribute_tensor(whole(number), mesh, placements)
        state["empty"] = distribute_tensor(torch.ones(1, 3), mesh, (Shard(0),))
        write(folder, state)
    finally:
        dist.destroy_process_group()


def whole(number: int) -> Tensor:
    return torch.arange(35, dtype=torch.float32).view(5, 7) + number


@pytest.mark.full
def test_shards_of_any_division_are_joined(gloo: GlooPool, tmp_path: Path) -> None:
    gloo.run(2, save_sharded, str(tmp_path / "sharded"))
    expected = {f"placed.{number}": whole(number) for number in range(len(PLACEMENTS))}
    expected |= {"fsdp.weight": torch.full((3, 5), 0.5), "fsdp.bias": torch.full((3,), 1.5), "empty": torch.ones(1, 3)}
    tensors = {name: ForeignTensor(name, name) for name in expected}
    files = dcp_files.DcpFiles(tmp_path / "sharded", list(tensors.values()))
    assert files.names() == expected.keys()
    entries = read_metadata(tmp_path / "sharded")
    assert [len(entries[f"placed.{number}"].chunks) for number in range(3)] == [2, 2, 1]  # type: ignore[union-attr]
    for name, tensor in expected.items():
        assert torch.equal(files.read(name, tuple(slice(0, size) for size in tensor.shape)), tensor), name
        for row in range(tensor.shape[0]):
            box = (slice(row, row + 1), *(slice(0, size) for size in tensor.shape[1:]))
            assert torch.equal(files.read(name, box), tensor[row : row + 1])


def test_a_part_comes_from_the_chunks_that_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = [((0, 0), (2, 7)), ((2, 0), (3, 3)), ((2, 3), (3, 4))]
    chunks = tuple(DcpChunk(offset, shape, "file", 0, 0) for offset, shape in boxes)
    monkeypatch.setattr(dcp_files, "read_metadata", lambda folder: {"w": DcpTensor("float32", (5, 7), chunks)})
    tensor, expected = ForeignTensor("w", "w"), whole(0)
    files = dcp_files.DcpFiles(Path(), [tensor])

    def chunk_of(name: str, stored: DcpTensor, chunk: DcpChunk) -> Tensor:
        return expected[tuple(slice(begin, begin + size) for begin, size in zip(chunk.offset, chunk.shape, strict=True))]

    monkeypatch.setattr(files, "_chunk", chunk_of)
    for start in range(5):
        for stop in range(start + 1, 6):
            for left, right in ((0, 7), (2, 5), (3, 7), (0, 2)):
                box = (slice(start, stop), slice(left, right))
                assert torch.equal(files.read("w", box), expected[box])


def test_an_export_is_read_by_dcp_and_by_titan(copied: Path) -> None:
    expected = weights()
    assert main(["checkpoint", "convert", "source", "titan", *IMPORT]) == 0
    assert main(["checkpoint", "convert", "titan", "exported", "--to", "dcp"]) == 0
    assert main(["checkpoint", "convert", "titan", "half", "--to", "dcp", "--dtype", "bfloat16"]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for folder in ("exported", "half"):
            dcp_to_torch_save(folder, f"{folder}.pt")
    require_equal(torch.load("exported.pt", weights_only=True), expected)
    require_equal(torch.load("half.pt", weights_only=True), {name: value.bfloat16() for name, value in expected.items()})
    assert main(["checkpoint", "convert", "exported", "again", *IMPORT]) == 0
    require_equal(imported("again"), expected)


def test_metadata_of_older_torch_is_read(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.3, the tensors' properties were defined elsewhere and had no strides."""
    expected = read_metadata(copied)
    with (copied / ".metadata").open("rb") as file:
        metadata: Metadata = pickle.load(file)
    full = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: full(self)[:5])
    del metadata.storage_meta, metadata.version
    new, old = b"torch.distributed.checkpoint.metadata\n", b"torch.distributed._shard.sharded_tensor.metadata\n"
    text = pickle.dumps(metadata, protocol=2)
    text = text.replace(new + b"TensorProperties\n", old + b"TensorProperties\n")
    text = text.replace(new + b"_MEM_FORMAT_ENCODING\n", old + b"MEM_FORMAT_ENCODING\n")
    assert text.count(old) > 1
    (copied / ".metadata").write_bytes(text)
    assert read_metadata(copied) == expected


def test_a_scalar_is_one_chunk(in_tmp: Path) -> None:
    write("source", {"a": torch.tensor(3.0)})
    assert isinstance(entry := read_metadata(Path("source"))["a"], DcpTensor) and entry.shape == ()


def test_a_shared_weight_may_have_all_its_names(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {name: tensor for name, tensor in weights().items() if name != "output.weight"}
    convert = ["checkpoint", "convert", "source", "titan", *IMPORT, "--model.args.tie_embeddings", "true"]
    write("source", {**state, "output.weight": state["tok_embeddings.weight"] + 1})
    assert main(convert) == 2
    assert "output.weight differs from tok_embeddings.weight, but the model uses one weight" in capsys.readouterr().err
    write("source", {**state, "output.weight": state["tok_embeddings.weight"].clone()})
    assert main(convert) == 0
    require_equal(imported(), state)
