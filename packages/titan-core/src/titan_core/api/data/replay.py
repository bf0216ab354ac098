"""Reading the steps of a run again, after or during it, to list their documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from titan_core.api.data.dataset import DocumentPlace, DocumentSource, StepRows

if TYPE_CHECKING:
    from titan_core.api.training.batch import Batch


@dataclass(frozen=True)
class SavedPosition:
    """The position in the data in a checkpoint."""

    step: int
    """Number of steps before it."""
    state: Mapping[str, Any]
    """The result of :meth:`~titan_core.api.checkpoint.store.DataPosition.state_dict`, with the shards of all ranks."""
    changed: tuple[str, ...] = ()
    """Patterns of the differences from the stream to which it belongs that the run has recorded: its mixture has changed."""
    checkpoint: str | None = None
    """Where the checkpoint is, for :meth:`titan_core.api.checkpoint.stored_model.StoredModels.find`."""


class DataReplay(Protocol):
    """The data of a job, which is opened once and read from any of its positions."""

    @property
    def sources(self) -> Sequence[DocumentSource]:
        """The opened datasets, in the order of the job's."""

    def require_same(self, saved: SavedPosition) -> None:
        """Check that the job reads the stream to which ``saved`` belongs.

        Raises:
            UserError: the data, or settings on which the stream depends, have changed.
        """

    def read(self, shards: Iterable[int], after: SavedPosition | None = None) -> Iterator[StepRows]:
        """Yield the rows of the given logical shards, step by step, with :attr:`~StepRows.used`.

        Args:
            after: where to begin; ``None``: with the first step.

        Raises:
            UserError: the data cannot be read, or is not that which was read before the position was saved.
        """

    def batch(self, rows: StepRows) -> Batch:
        """Return the global batch of a step, as training makes it. Imports torch.

        Args:
            rows: of all logical shards, in order.
        """

    def last_epoch(self, dataset: int, step: int, after: SavedPosition | None = None) -> int:
        """Return the newest epoch of which any logical shard has read documents up to ``step``, or reads some for its next
        sequence of the dataset.

        Args:
            after: where to begin to read, at most ``step`` steps from the first; ``None``: with the first step.

        Raises:
            UserError: see :meth:`read`.
        """

    def position_after(self, step: int, after: SavedPosition | None = None) -> SavedPosition:
        """Return the position after ``step``.

        Args:
            after: see :meth:`last_epoch`.

        Raises:
            UserError: see :meth:`read`.
        """

    def reached(self, dataset: int, shard: int) -> tuple[int, DocumentPlace | None]:
        """Return the epoch of a logical shard in the last :meth:`read`, and the last document that its source has returned;
        ``None`` if none of that epoch, or if the source does not say."""
