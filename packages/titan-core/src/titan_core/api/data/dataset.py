"""Datasets as the core sees them: documents, in logical shards whose positions can be saved. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

from titan_core.api.data.tokenizer import TextTokenizer, TokenizerContext, TokenizerSpec
from titan_core.api.plugins.errors import PartOfContract
from titan_core.api.plugins.job import BatchPlan, BuildContext, S
from titan_core.api.plugins.ref import Ref

if TYPE_CHECKING:
    from numpy.typing import NDArray


State = dict[str, Any]
"""A position: plain values that survive JSON."""


@dataclass(frozen=True)
class ExtraField:
    """The form of a named tensor that a dataset fills in each batch: a mask of image tokens, a reward, a teacher's ids."""

    dtype: str
    """``bool``, ``uint8``, ``int8``, ``int16``, ``int32``, ``int64``, ``float16``, ``float32`` or ``float64``."""
    shape: tuple[int, ...] = ()
    """Shape of one value."""
    sequence: bool = True
    """Whether there is a value for each token, which stands at the position where the token is the input, and is divided
    with the tokens. If not, there is one value for each document, and each document has a sequence of its own."""
    fill: float | None = None
    """Value where a document, or another dataset of the mixture, gives none; ``None``: all of them must give values. Padding
    has this value, or 0."""

    def __post_init__(self) -> None:
        if self.dtype not in EXTRA_TYPES:
            raise ValueError(f"the dtype of an extra tensor is one of {', '.join(EXTRA_TYPES)}, not {self.dtype!r}")
        if not all(isinstance(size, int) and size > 0 for size in self.shape):
            raise ValueError(f"the shape of an extra tensor consists of positive numbers, not {self.shape!r}")


EXTRA_TYPES: Final = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""Types that numpy and torch share."""


@dataclass(frozen=True)
class WeightedTokens:
    """Token ids of a document, with a weight for each: tokens of a prompt, for example, may be excluded from the loss."""

    ids: NDArray[Any]
    """``[tokens]``, including the tokens that mark begin and end, as in every pre-tokenised document."""
    weights: NDArray[Any]
    """Weight of each token as a target, ``[tokens]``; 0 excludes it from the loss."""
    whole: bool = False
    """Whether the document must not be cut: if it does not fit into the rest of a sequence, it begins the next one, and the
    rest is padding. It may have at most ``seq_len + 1`` tokens."""
    parts: tuple[int, ...] = ()
    """Numbers of tokens of the documents of which it consists, if it is several that belong together, such as two answers to
    compare: they are in one sequence, next to each other, and each has positions and attention of its own under
    ``data.document_mask``. Requires ``whole``."""
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Values for the extra tensors that the dataset declares (:attr:`titan_core.api.Dataset.extras`), by name: ``[tokens,
    *shape]``, or ``[*shape]`` if there is one value for each document."""


class TextPart(str):
    """A part of a longer text, such as a piece of a book: only the tokens that mark the text's begin and end are where the
    text itself begins and ends."""

    __slots__ = ("begins", "ends")
    begins: bool
    """Whether the text begins with this part."""
    ends: bool
    """Whether the text ends with this part."""

    def __new__(cls, text: str, *, begins: bool, ends: bool) -> TextPart:
        """See the attributes."""
        part = super().__new__(cls, text)
        part.begins, part.ends = begins, ends
        return part


def encode_text(tokenizer: TextTokenizer, text: str) -> list[int] | NDArray[Any]:
    """Return the ids of a text, with the tokens that mark its begin and end. Those of a :class:`TextPart` mark it only where
    the whole text begins or ends; a tokenizer that does not say which tokens these are (:meth:`TextTokenizer.marks`) marks
    each part."""
    ids = tokenizer.encode_document(text)
    if not isinstance(text, TextPart) or (text.begins and text.ends):
        return ids
    begin, end = tokenizer.marks() or ((), ())
    return ids[0 if text.begins else len(begin) : len(ids) - (0 if text.ends else len(end))]


Document: TypeAlias = "str | NDArray[Any] | WeightedTokens"
"""A text, or a :class:`TextPart`; token ids if the dataset is pre-tokenised."""

ALL_SPLITS = "all"

Shuffle: TypeAlias = Literal["documents", "blocks", "none"]
"""Orders of the documents of a dataset (``data.shuffle``)."""

OnEnd = Literal["repeat", "stop", "once"]
"""At the end of a dataset: read it again (``repeat``), drop a window that cannot be filled (``stop``), or return that window
short and nothing after it (``once``)."""


class CorruptRecord(PartOfContract):
    """A record that does not contain a document. The next one can be read; ``data.on_corrupt`` decides whether to.

    Args:
        place: the file, and the line, row or byte in it.
        why: what is wrong with the record.
    """

    def __init__(self, place: str, why: str, fix: str = "fix it") -> None:
        super().__init__(place, why, fix)
        self.place, self.why, self.fix = place, why, fix


class ExcludedRecord(PartOfContract):
    """A record that the dataset's settings exclude. It is skipped, counted and logged. The next one can be read.

    Args:
        place: the file, and the line, row or byte in it.
        why: the reason.
    """

    def __init__(self, place: str, why: str) -> None:
        super().__init__(place, why)
        self.place, self.why = place, why


@dataclass(frozen=True)
class FormatSpec:
    """The value of ``data.format``: the name of a registered format, or a template of the record's fields."""

    text: str
    key: str
    """Config key of the value, for error messages."""
    convert: Ref[Callable[[Mapping[str, Any]], Any]] | None = None
    """:attr:`titan_core.api.RecordFormat.convert` of the registered format; ``None`` for a template."""


@dataclass(frozen=True)
class DatasetContext(BuildContext[S]):
    """The context with which a dataset is checked and opened. It is sent to worker processes."""

    name: str
    """Name of the component (one implementation may register several)."""
    path: str | None
    """``training.dataset_path``, or that of a part of a mixture or of a validation set; ``None``: not given."""
    text_field: str
    """Name of a record's field that holds its text (``data.text_field``)."""
    seed: int
    """``training.seed``, from which the order of the documents follows, whatever the mesh."""
    where: str
    """Origin of ``path``, for error messages."""
    split_key: str = "training.dataset_split"
    """Key that sets ``split``, for error messages."""
    format: FormatSpec | None = None
    """How a record (a mapping) becomes its text; replaces ``text_field``."""
    split: str | None = None
    """The requested split of a dataset that has several; :data:`ALL_SPLITS` requests all of them. ``None`` requests
    :attr:`default_split`; if it is unclear which split that is, the dataset is refused."""
    default_split: Literal["train", "validation"] = "train"
    """The purpose of the dataset, which selects a split if none is requested."""
    skip_corrupt: bool = False
    """Whether the dataset is accepted although it has corrupt records."""
    max_record_bytes: int = 2**24
    """What a record may take (``data.max_record_bytes``). A larger one is corrupt."""
    tokenizer: str = ""
    """Fingerprint of the job's tokenizer (:func:`titan_core.api.TextTokenizer.fingerprint`), for datasets of tokens."""
    vocab_size: int | None = None
    """Vocabulary size of the job's tokenizer, for datasets of tokens only. Token ids must be smaller."""
    tokenizer_spec: TokenizerSpec | None = None
    """The job's tokenizer, for datasets that tokenise their documents."""
    seq_len: int | None = None
    """Length of the job's sequences, for datasets that tokenise their documents."""
    shuffle: Shuffle = "documents"
    """Order of the documents (``data.shuffle``), for :class:`~titan_core.api.ShuffledDocuments`."""


@dataclass(frozen=True)
class DocumentPlace:
    """Where a document is in its dataset."""

    text: str
    """The file, and the line, row or record in it, as errors name it."""
    index: int | None = None
    """Number of the document, or of the group of documents that are fetched together; ``None`` for a stream."""


class DocumentShard(Protocol):
    """One logical shard in one epoch: an iterator over its documents. After a :class:`CorruptRecord` or an
    :class:`ExcludedRecord`, iteration continues with the following document. After any other error, a position must be
    loaded before the next read.

    It may also have a method ``place()``, which returns the :class:`DocumentPlace` of the document before the current
    position, the one that was read last; ``None`` at the beginning. It is called only to list the documents of past steps.
    """

    def __iter__(self) -> Iterator[Document]:
        """Return ``self``."""

    def __next__(self) -> Document:
        """Return the next document."""

    def state_dict(self) -> State:
        """Return the current position; loading it makes the next document the same as now."""

    def load_state_dict(self, state: State) -> None:
        """Move to a position that :meth:`state_dict` returned."""


@runtime_checkable
class DocumentSource(Protocol):
    """An opened dataset.

    It may also have a property ``fingerprint``: plain values that change if its documents change
    (:func:`~titan_core.api.data.shuffled.fingerprint_files`), so that a resumed run can detect it. A source without one is
    identified by its path only. And a property ``order``: a name that changes if the same documents come in another order,
    in which older positions are meaningless; it contains the value of ``data.shuffle``. And a method ``requests``, for the
    cost of that order (:meth:`~titan_core.api.ShuffledDocuments.requests`). And the methods ``find`` and ``position``, to
    list the steps that used a document (:meth:`~titan_core.api.ShuffledDocuments.find`).
    """

    @property
    def num_documents(self) -> int | None:
        """Number of documents per epoch; ``None`` if unknown (a stream)."""

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """Return logical shard ``index`` of ``count`` in ``epoch`` (from 0). The shards of an epoch partition its documents.
        The result depends on the arguments only, so ranks need not communicate."""


@dataclass(frozen=True)
class ReadPolicy:
    """How to handle errors of a source."""

    on_corrupt: Literal["stop", "skip"] = "stop"
    retries: int = 5
    first_wait: float = 1.0
    """Seconds before the first retry; doubles for each further retry."""


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset of a mixture."""

    name: str
    """Name in metrics."""
    weight: float
    build: Ref[Callable[[DatasetContext[Any]], DocumentSource]]
    context: DatasetContext[Any]
    extras: Mapping[str, ExtraField] = field(default_factory=dict, hash=False)
    """The extra tensors that it fills, by name."""


@dataclass(frozen=True)
class StreamSpec:
    """Datasets, how they are mixed and tokenised, and how the global batch is divided into logical shards."""

    datasets: tuple[DatasetSpec, ...]
    tokenizer: Ref[Callable[[TokenizerContext[Any]], TextTokenizer]]
    tokenizer_context: TokenizerContext[Any]
    plan: BatchPlan
    seed: int
    on_end: OnEnd
    policy: ReadPolicy = field(default_factory=ReadPolicy)
    shuffle: Shuffle = "documents"
    """Order of datasets that are no streams."""
    shuffle_buffer: int = 0
    """Number of documents in the shuffle buffer of a streamed dataset."""
    packing_window: int = 0
    """Number of documents that are packed together by best fit; 0: documents are concatenated and cut into sequences."""
    excluded: Mapping[str, frozenset[int]] = field(default_factory=dict, hash=False)
    """Indices of documents that are passed over, by dataset."""

    @property
    def extras(self) -> dict[str, ExtraField]:
        """The extra tensors of its batches, by name."""
        return {name: extra for dataset in self.datasets for name, extra in dataset.extras.items()}
