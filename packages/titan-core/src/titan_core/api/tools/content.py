"""Telling whether the files of a dataset are those that they were, at a cost that does not grow with them. Free of torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_core.api.dataset import DocumentSource

_WHOLE = 4 << 20
"""Bytes up to which everything is read."""
_SAMPLES, _SAMPLE = 64, 16 << 10
"""Beyond that, so many places are, spread evenly from the first byte to the last."""


def fingerprint_of(source: DocumentSource) -> Mapping[str, Any] | None:
    """The source's :attr:`~titan_core.api.dataset.DocumentSource.fingerprint`; ``None`` where it has none (a stream, or a
    third party's)."""
    fingerprint: Mapping[str, Any] | None = getattr(source, "fingerprint", None)
    return dict(fingerprint) if fingerprint is not None else None


def fingerprint_files(files: Sequence[Path]) -> dict[str, Any]:
    """The number of ``files``, their bytes, and the SHA-256 of their sizes and of a sample of their content, in this order.
    Names and times are no part of it: a copy has the same fingerprint. A change that keeps every size, in one place of large
    files, may go unnoticed."""
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    digest = hashlib.sha256(repr(sizes).encode())
    if total <= _WHOLE:
        for file in files:
            digest.update(file.read_bytes())
    else:
        for number in range(_SAMPLES):
            digest.update(_read(files, sizes, number * (total - _SAMPLE) // (_SAMPLES - 1), _SAMPLE))
    return {"files": len(files), "bytes": total, "sample": digest.hexdigest()[:32]}


def _read(files: Sequence[Path], sizes: Sequence[int], start: int, length: int) -> bytes:
    """Bytes of the files as if they were one."""
    parts = []
    for file, size in zip(files, sizes, strict=True):
        if start < size and length > 0:
            with file.open("rb") as stream:
                stream.seek(start)
                parts.append(stream.read(length))
            length -= len(parts[-1])
            start = size
        start -= size
    return b"".join(parts)
