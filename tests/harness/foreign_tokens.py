"""Datasets of token ids in the formats of other tools (:mod:`titan_data.foreign`)."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy

from harness.kinds_of_data import FOREIGN, IDS
from titan_core.api import DatasetContext, WeightedTokens
from titan_data.foreign.config import FlatTokensSection
from titan_data.foreign.formats import check_tokens

END = 257


def context(name: str, path: Path, section: Any = None, vocab_size: int = 258, **more: Any) -> DatasetContext[Any]:
    """Return the context of dataset ``name``."""
    where = "training.dataset_path"
    return DatasetContext(name, str(path), "text", 0, where, section=section, vocab_size=vocab_size, **more)


def llm_c(folder: Path, magic: int = 20240520, version: int = 1, dtype: type = numpy.uint16) -> Path:
    """Write all documents as one shard of llm.c; return its folder."""
    ids = numpy.array([*chain.from_iterable(IDS)], dtype)
    header = numpy.zeros(256, numpy.int32)
    header[:3] = magic, version, len(ids)
    (folder / "train_000001.bin").write_bytes(header.tobytes() + ids.tobytes())
    return folder


UINT16 = FlatTokensSection(dtype="uint16", end_token_id=END)
HEADER = FlatTokensSection(end_token_id=END)


def problems(asked: DatasetContext[Any]) -> list[str]:
    """Return what the check of a dataset finds before training."""
    return [*map(str, check_tokens(asked))]


def ids_of(document: Any) -> list[int]:
    """Return the ids of a document, with or without weights."""
    ids: list[int] = (document.ids if isinstance(document, WeightedTokens) else document).tolist()
    return ids


def copied(folder: Path, name: str) -> Path:
    """Copy the files of a fixture; return the path by which a dataset finds them."""
    for file in FOREIGN.glob(f"{name}*"):
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        else:
            shutil.copy(file, folder / file.name)
    return folder / name


def patched(path: Path, at: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    data = bytearray(path.read_bytes())
    data[at : at + len(content)] = content
    path.write_bytes(data)
