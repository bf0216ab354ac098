"""The tokenizer of a job whose tokenizer file is not on this machine. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan_core.api import Problem, UserError


@dataclass(frozen=True)
class MissingTokenizer:
    """Has the vocabulary of the model, and refuses to convert anything."""

    vocab_size: int
    """That of the model, because a tokenizer's may not be larger."""
    missing: tuple[Problem, ...]
    """What the job lacks."""

    def encode_document(self, text: str) -> list[int]:
        """Raise :class:`~titan_core.api.UserError`."""
        raise UserError(*self.missing)

    def decode(self, ids: Sequence[int]) -> str:
        """Raise :class:`~titan_core.api.UserError`."""
        raise UserError(*self.missing)
