"""What a tokenizer is to the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from titan_core.api.build_context import BuildContext, S

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenizerContext(BuildContext[S]):
    """What a tokenizer is built with. It travels to worker processes."""

    path: str | None
    """``model.tokenizer_path``."""


class TextTokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    def encode_document(self, text: str) -> list[int] | NDArray[Any]:
        """The ids of a whole document, with the tokens that mark its begin and end. Special tokens' names inside the text
        are plain text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens shown by name."""
        ...


@runtime_checkable
class DescribesMarks(Protocol):
    """A tokenizer that found out which tokens mark documents, and can say from where."""

    def describe_marks(self) -> list[str]:
        """A line for the begin and one for the end."""
        ...
