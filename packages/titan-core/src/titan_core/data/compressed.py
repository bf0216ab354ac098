"""Compressed local files, read through a decompressed copy that is made once and kept in the cache of ``datasets``."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from titan_core.errors import UserError

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bz2"}
"""Endings, and what ``fsspec`` calls them."""


def decompressed(files: Sequence[Path]) -> list[Path]:
    """``files``, each compressed one replaced by its copy.

    Raises:
        UserError: a file is not what its name says, or there is no room for the copy.
    """
    return [_copy(file) if file.suffix in COMPRESSED else file for file in files]


def _copy(file: Path) -> Path:
    import datasets
    import fsspec

    about = file.stat()
    key = hashlib.sha256(f"{file.resolve()}:{about.st_size}:{about.st_mtime_ns}".encode()).hexdigest()[:24]
    copy = Path(datasets.config.HF_DATASETS_CACHE) / "decompressed" / f"{key}-{file.stem}"
    if copy.exists():
        return copy
    partial = copy.with_name(f"{copy.name}.{uuid.uuid4().hex}.partial")  # ranks may be at it at the same time
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with fsspec.open(str(file), "rb", compression=COMPRESSED[file.suffix]) as packed, partial.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
        partial.replace(copy)
    except Exception as error:  # each format's library has errors of its own
        partial.unlink(missing_ok=True)
        reason = f"cannot be decompressed as {COMPRESSED[file.suffix]}: {error}"
        raise UserError.one(str(file), reason, "mend or rename the file; the copy goes to HF_DATASETS_CACHE") from error
    return copy
