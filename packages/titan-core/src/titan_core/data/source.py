"""What a dataset is to the core: documents, in logical shards whose positions can be saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

State = dict[str, Any]


@dataclass(frozen=True)
class DatasetRequest:
    """What a config asks of a dataset. Free of torch."""

    name: str
    """The component's name (one implementation may register several)."""
    path: str | None
    text_field: str
    seed: int
    where: str
    """Where ``path`` came from, for errors."""


class DocumentShard(Protocol):
    """One logical shard: an endless iterator over documents' texts would never end; this one ends with an epoch."""

    def __iter__(self) -> Iterator[str]: ...

    def __next__(self) -> str: ...

    def state_dict(self) -> State:
        """The position: what :meth:`load_state_dict` needs for the next document to be the one that is next now."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Go to a position that :meth:`state_dict` gave."""
        ...


class DocumentSource(Protocol):
    """An opened dataset."""

    @property
    def num_documents(self) -> int | None:
        """How many documents an epoch has; ``None`` where that is not known (a stream)."""
        ...

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """Logical shard ``index`` of ``count`` in ``epoch`` (from 0). The shards of an epoch divide its documents: each
        document is in exactly one. A function of its arguments alone, so that ranks need not speak to each other."""
        ...
