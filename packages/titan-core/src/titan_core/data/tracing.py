"""Which documents a stream has read, for those who ask after training: nothing is noted while a job trains."""

from __future__ import annotations

from typing import Any

from titan_core.api import DocumentShard
from titan_core.api.data.dataset import DocumentPlace


def place_of(shard: DocumentShard) -> DocumentPlace | None:
    """Return the place of the document that was read last from ``shard``; ``None`` if the shard does not know it."""
    place: Any = getattr(shard, "place", None)
    found: DocumentPlace | None = place() if place is not None else None
    return found
