"""The tokenizer of a job whose tokenizer file is not on this machine. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from titan_core.api import Problem, TextTokenizer, UserError


class MissingTokenizer(TextTokenizer):
    """Refuses to convert anything, and has no marks."""

    def __init__(self, vocab_size: int, missing: Sequence[Problem]) -> None:
        """
        Args:
            vocab_size: the model's, because a tokenizer's may not be larger.
            missing: what the job lacks.
        """
        self._vocab_size, self._missing = vocab_size, missing

    @property
    def vocab_size(self) -> int:
        """That of the model."""
        return self._vocab_size

    def marks(self) -> None:
        """Unknown."""

    def encode_document(self, text: str) -> list[int]:
        """Raise :class:`~titan_core.api.UserError`."""
        raise UserError(*self._missing)

    def decode(self, ids: Sequence[int]) -> str:
        """Raise :class:`~titan_core.api.UserError`."""
        raise UserError(*self._missing)
