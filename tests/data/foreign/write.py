"""Writes the files beside this script, with the libraries whose formats they have. Run it in an environment of its own,
because these libraries are no dependencies of Titan's::

    uv run --no-project --python 3.11 --with megatron-core==0.16.1 --with mosaicml-streaming==0.10.0 --with datatrove==0.9.0
    \
        --with torch --with humanize python tests/data/foreign/write.py

The texts, and so the files, are Titan's own and under its license. The libraries (megatron-core: BSD-3-Clause;
mosaicml-streaming and datatrove: Apache-2.0) only wrote them; none of their code is here.
"""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path

import numpy
from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from streaming import MDSWriter

HERE = Path(__file__).parent
END = 257


def documents() -> list[list[int]]:
    """Return the ids that Titan's byte tokenizer gives to some texts, each with its end token and no begin token."""
    return [[*text.encode(), END] for text in json.loads((HERE / "texts.json").read_text())]


def megatron(name: str, dtype: type, sentences: bool) -> None:
    """``sentences``: divide each document into two sequences."""
    builder = IndexedDatasetBuilder(str(HERE / f"{name}.bin"), dtype=dtype)
    for ids in documents():
        half = len(ids) // 2 if sentences else len(ids)
        parts = [part for part in (ids[:half], ids[half:]) if part]
        builder.add_document([*chain.from_iterable(parts)], [len(part) for part in parts])
    builder.finalize(str(HERE / f"{name}.idx"))


def mds(name: str, column: str, dtype: str, compression: str | None = None) -> None:
    """``column``: an encoding of MDS; ``dtype``: of the ids in it."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    columns = {"tokens": column, "source": "str"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1500, compression=compression) as writer:
        for number, ids in enumerate(documents()):
            array = numpy.array(ids, dtype)
            writer.write({"tokens": array.tobytes() if column == "bytes" else array, "source": f"text {number}"})


def datatrove(name: str, size: int, weighted: bool) -> None:
    """``weighted``: write which tokens have a loss: all but the first three of each document."""
    file = TokenizedFile(
        str(HERE), f"{name}.ds", save_loss_metadata=weighted, tokenizer_name_or_path="titan/byte", token_size=size,
        save_final_metadata=True,
    )  # fmt: skip
    for ids in documents():
        file.write(ids, numpy.arange(len(ids)) >= 3 if weighted else None)
    file.close()


if __name__ == "__main__":
    megatron("megatron_uint16", numpy.uint16, sentences=False)
    megatron("megatron_int32", numpy.int32, sentences=True)
    mds("mds_int32", "ndarray:int32", "int32")
    mds("mds_any", "ndarray", "uint16")
    mds("mds_bytes", "bytes", "int64")
    mds("mds_zstd", "ndarray:int32", "int32", compression="zstd")
    mds("mds_gz", "ndarray:int32", "int32", compression="gz")
    datatrove("datatrove_uint16", 2, weighted=False)
    datatrove("datatrove_uint32", 4, weighted=True)
