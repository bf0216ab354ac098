"""The loss of a model on a dataset, per token and per byte of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from titan_core.api import TextTokenizer
from titan_core.api.checkpoint.stored_model import LoadedModel, StoredModels

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a dataset."""

    loss: float
    """Mean negative log-likelihood of a target token, in nats."""
    tokens: int
    """Number of target tokens."""
    bytes_per_token: float | None
    """Bytes of UTF-8 text per token of the documents that were read, special tokens included; ``None`` if the dataset holds
    token ids instead of text."""
    seconds: float

    @property
    def perplexity(self) -> float:
        """``exp(loss)``."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits to encode a byte of the text with the model: comparable between tokenizers (Gao et al., arXiv 2101.00027,
        section 3.1)."""
        return None if self.bytes_per_token is None else self.loss / math.log(2) / self.bytes_per_token


class CountingTokenizer(TextTokenizer):
    """A tokenizer that counts the bytes and tokens of the documents that it encodes."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.bytes = self.tokens = 0

    @property
    def vocab_size(self) -> int:
        """See :class:`~titan_core.api.TextTokenizer`."""
        return self._tokenizer.vocab_size

    def encode_document(self, text: str) -> list[int] | NDArray[Any]:
        """See :class:`~titan_core.api.TextTokenizer`."""
        ids = self._tokenizer.encode_document(text)
        if text:  # the reader encodes an empty text to recognise empty documents
            self.bytes += len(text.encode(errors="replace"))
            self.tokens += len(ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """See :class:`~titan_core.api.TextTokenizer`."""
        return self._tokenizer.decode(ids)


def measure(models: StoredModels, loaded: LoadedModel) -> Perplexity:
    """Return the model's perplexity on the validation data of its job. Called on all ranks.

    Raises:
        UserError: the data cannot be read, or has no target tokens.
    """
    world = loaded.world
    counting = CountingTokenizer(loaded.job.text_tokenizer)
    report = models.validate(replace(loaded, job=replace(loaded.job, text_tokenizer=counting)))
    read = torch.tensor([counting.bytes, counting.tokens], dtype=torch.float64)
    if not world.is_first_along("weights"):
        read.zero_()  # these ranks read the same documents as the first
    size, tokens = world.sum(read).tolist()
    return Perplexity(report.loss, report.num_targets, size / tokens if tokens else None, report.seconds)
