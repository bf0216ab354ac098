"""Checkpoints of ``torch.distributed.checkpoint`` (DCP), as TorchTitan writes them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from titan_ckpt.format.chunks import read_whole
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import read_manifest
from titan_testing.tiny import define
from titan_testing.tiny_args import TinyArgs

SIZES = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48}
MODEL = ("--recipe", "tiny", *(text for key, value in SIZES.items() for text in (f"--model.args.{key}", str(value))))
IMPORT = ("--allow-pickle", *MODEL)


def weights() -> dict[str, Tensor]:
    """Random weights of a tiny model."""
    generator = torch.Generator().manual_seed(3)
    state = define(TinyArgs(**SIZES)).build().state_dict()  # type: ignore[arg-type]
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


def write(folder: Path | str, state: dict[str, Any]) -> None:
    """Write a DCP checkpoint, as TorchTitan does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(folder))


def imported(folder: str = "titan") -> dict[str, Tensor]:
    """The weights in a Titan checkpoint."""
    manifest = read_manifest(Folder(folder))
    return {name.removeprefix("model."): read_whole(Folder(folder), manifest, name) for name in manifest.tensors}


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
