"""Reading again the data that a run has trained on: ``DataReplay``, its rows and positions. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from titan_core.api.data.dataset import DocumentPlace, DocumentSource, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from titan_core.api.training.batch import Batch


@dataclass(frozen=True)
class ReadDocument:
    """A document that a traced stream has read."""

    epoch: int
    """Number of times that the logical shard had been read to its end before."""
    place: DocumentPlace | None
    """``None`` if the source does not say where its documents are."""
    tokens: int
    """Number of its tokens."""


@dataclass(frozen=True)
class UsedTokens:
    """Successive tokens of a document in a row of a batch."""

    document: ReadDocument
    first: int
    """Number of the first of them in the document, from 0."""
    tokens: int


@dataclass(frozen=True)
class StepRows:
    """Rows that some logical shards contribute to one step. A row is a sequence and the target after its last token."""

    tokens: NDArray[Any]
    """``[rows, seq_len + 1]``, unsigned; short rows are padded with 0."""
    weights: NDArray[Any] | None
    """Weight of each token as a target, ``[rows, seq_len + 1]``, fp32; ``None``: 1 each."""
    lengths: list[list[int]]
    """Number of tokens of each document in each row. They sum to ``seq_len + 1`` unless the row is short."""
    datasets: list[int]
    """Dataset of each row."""
    positions: dict[str, State]
    """Position of each logical shard after these rows."""
    epoch: int
    """Number of complete passes over the datasets."""
    corrupt: int
    """Number of corrupt records skipped so far."""
    empty: int
    """Number of documents skipped so far because they are empty or the dataset's settings exclude them."""
    ended: bool
    """Whether the data has ended, so that these rows are empty."""
    documents: int = 0
    """Number of documents in the rows so far."""
    cut: int = 0
    """Number of those of which no row has all tokens."""
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Extra tensors by name: ``[rows, seq_len + 1, *shape]``, or ``[rows, *shape]`` if they have a value for each row."""
    used: list[list[UsedTokens]] = field(default_factory=list)
    """What each row consists of, parallel to :attr:`lengths`, if the stream is traced; else empty."""


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
