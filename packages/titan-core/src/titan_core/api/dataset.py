"""What a dataset is to the core: documents, in logical shards whose positions can be saved. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from titan_core.api.batch_plan import BatchPlan
from titan_core.api.build_context import BuildContext, S
from titan_core.api.ref import Ref
from titan_core.api.tokenizer import TextTokenizer, TokenizerContext

if TYPE_CHECKING:
    from numpy.typing import NDArray

State = dict[str, Any]
"""A position: plain values, as JSON can say them."""


@dataclass(frozen=True)
class WeightedTokens:
    """Token ids of which some are not trained on, such as those of a prompt, or count more than others."""

    ids: NDArray[Any]
    """``[tokens]``, with the tokens that mark begin and end, as of any document that is tokenised already."""
    weights: NDArray[Any]
    """How much each token counts where it is the target, ``[tokens]``: 0 keeps it from being trained on."""


Document: TypeAlias = "str | NDArray[Any] | WeightedTokens"
"""A text, or its token ids where a dataset is tokenised already."""

ALL_SPLITS = "all"

OnEnd = Literal["repeat", "stop", "once"]
"""At a dataset's end: read it again; give nothing for a window that cannot be filled; or give that window short, and
nothing after it."""


class CorruptRecord(Exception):
    """A record that holds no document. The next one can be read: ``data.on_corrupt`` decides what happens.

    Args:
        place: the file and the line, row or byte.
        why: what is wrong with it.
    """

    def __init__(self, place: str, why: str, fix: str = "fix it") -> None:
        super().__init__(place, why, fix)
        self.place, self.why, self.fix = place, why, fix


@dataclass(frozen=True)
class DatasetContext(BuildContext[S]):
    """What a dataset is checked and opened with. It travels to worker processes."""

    name: str
    """The component's name (one implementation may register several)."""
    path: str | None
    text_field: str
    seed: int
    where: str
    """Where ``path`` came from, for errors."""
    split_key: str = "training.dataset_split"
    """The key that sets ``split``, for errors."""
    format: str | None = None
    """``"package.module:function"``, from a record (a mapping) to its text, in the place of ``text_field``."""
    split: str | None = None
    """The split that was requested, of a dataset that has several; :data:`ALL_SPLITS` is all of them. ``None``:
    :attr:`default_split`, refused where that is not clear."""
    default_split: Literal["train", "validation"] = "train"
    """What the dataset is for, and so which of several splits is read without a request."""
    skip_corrupt: bool = False
    """Whether a corrupt record is no reason to refuse the dataset."""
    tokenizer: str = ""
    """Fingerprint of the job's tokenizer (:func:`titan_core.api.tokenizer.fingerprint`), for datasets of tokens."""
    vocab_size: int | None = None
    """Ids of the job's tokenizer are below it; for datasets of tokens alone."""


class DocumentShard(Protocol):
    """One logical shard in one epoch: an iterator over its documents. After a :class:`CorruptRecord` the next document is
    that after it; after another error it must be brought to a position again before it is read from."""

    def __iter__(self) -> Iterator[Document]: ...

    def __next__(self) -> Document: ...

    def state_dict(self) -> State:
        """The position: what :meth:`load_state_dict` needs for the next document to be the one that is next now."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Go to a position that :meth:`state_dict` gave."""
        ...


class DocumentSource(Protocol):
    """An opened dataset.

    It may have a property ``fingerprint`` too: plain values that are the same as long as its documents are
    (:func:`~titan_core.api.tools.shuffled.fingerprint_files`), by which a resumed run notices that its data changed. A
    source without one is known by its path alone.
    """

    @property
    def num_documents(self) -> int | None:
        """How many documents an epoch has; ``None`` where that is not known (a stream)."""
        ...

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """Logical shard ``index`` of ``count`` in ``epoch`` (from 0). The shards of an epoch divide its documents: each
        document is in exactly one. A function of its arguments alone, so that ranks need not speak to each other."""
        ...


@dataclass(frozen=True)
class ReadPolicy:
    """What to do about errors of a source."""

    on_corrupt: Literal["stop", "skip"] = "stop"
    retries: int = 5
    first_wait: float = 1.0
    """Seconds before the first retry; doubled for each further one."""


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset of a mixture."""

    name: str
    """What it is called in metrics."""
    weight: float
    build: Ref[Callable[[DatasetContext[Any]], DocumentSource]]
    context: DatasetContext[Any]


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
    shuffle_buffer: int = 0
    """Documents among which a streamed dataset is shuffled."""


@dataclass(frozen=True)
class StepRows:
    """What some logical shards give to one step; a row is a sequence and the target after its last token."""

    tokens: NDArray[Any]
    """``[rows, seq_len + 1]``, unsigned; what a short row lacks is 0."""
    weights: NDArray[Any] | None
    """How much each token counts as a target, ``[rows, seq_len + 1]``, fp32; ``None``: each counts 1."""
    lengths: list[list[int]]
    """Of each row, how many tokens each of its documents has there; they sum to the row's length, where it is not short."""
    datasets: list[int]
    """The dataset of each row."""
    positions: dict[str, State]
    """Each logical shard's position after these rows."""
    epoch: int
    """How many times the datasets were read to their end."""
    corrupt: int
    """Corrupt records that were skipped so far."""
    empty: int
    """Empty documents that were left out so far."""
    ended: bool
    """Whether there is nothing in these rows."""
