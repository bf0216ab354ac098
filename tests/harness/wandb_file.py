"""Reads an offline W&B run: records of W&B's protocol in the log format of LevelDB."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

FILE_HEADER, RECORD_HEADER, BLOCK = 7, 7, 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(file: Path) -> Iterator[Any]:
    """Yield every record of a ``.wandb`` file."""
    data, place, whole = file.read_bytes(), FILE_HEADER, b""
    while place + RECORD_HEADER <= len(data):
        if BLOCK - place % BLOCK < RECORD_HEADER:  # no header fits: the end of the block is padding
            place += BLOCK - place % BLOCK
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        place += RECORD_HEADER
        piece, place = data[place : place + length], place + length
        whole = piece if kind in (FULL, FIRST) else whole + piece
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(whole)
            yield record


def history(file: Path) -> list[dict[str, Any]]:
    """Return the logged metrics, in order."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]


def run_of(file: Path) -> Any:
    """Return the record that describes the run."""
    return next(record.run for record in records(file) if record.WhichOneof("record_type") == "run")
