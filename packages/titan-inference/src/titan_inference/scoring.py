"""The log-likelihood of given continuations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_core.api import ModelPart, Vocabulary
from titan_inference.generation import logits_of


class Scorer:
    """Scores continuations with a model that is whole, or divided by tensor parallelism or FSDP. All ranks must score the
    same ones in the same order."""

    def __init__(self, part: ModelPart, device: torch.device, batch_size: int) -> None:
        self._part, self._device, self._batch_size = part, device, batch_size

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, in nats, and whether each of its tokens is the most likely one.

        Args:
            pairs: token ids of a context and its continuation, at least one each. A pair that is longer than the model's
                context loses its first tokens.
        """
        longest = self._part.layout.max_seq_len
        rows = [[*context, *continuation][-(longest + 1) :] for context, continuation in pairs]
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda index: -len(rows[index]))  # rows of similar lengths need less padding
        for first in range(0, len(order), self._batch_size):
            batch = order[first : first + self._batch_size]
            counts = [min(len(pairs[index][1]), len(rows[index]) - 1) for index in batch]
            for index, score in zip(batch, self._scores([rows[index] for index in batch], counts), strict=True):
                scores[index] = score
        return scores

    def _scores(self, rows: list[list[int]], counts: list[int]) -> list[tuple[float, bool]]:
        """Score the last ``counts`` tokens of each row, given those before them."""
        width = max(map(len, rows)) - 1
        tokens = torch.tensor([row[:-1] + [0] * (width + 1 - len(row)) for row in rows], device=self._device)
        positions = torch.arange(width, device=self._device).expand(len(rows), width)
        logits = logits_of(self._part, tokens, positions)
        # Only these positions are gathered and converted, because all of them would need gigabytes.
        wanted = [
            logits[index, len(row) - 1 - count : len(row) - 1]
            for index, (row, count) in enumerate(zip(rows, counts, strict=True))
        ]
        targets = torch.tensor(
            [token for row, count in zip(rows, counts, strict=True) for token in row[-count:]], device=self._device
        )
        likelihood, greedy = likelihoods(torch.cat(wanted), targets, self._part.vocabulary, self._part.layout.vocab_size)
        return [
            (float(values.sum()), bool(agrees.all()))
            for values, agrees in zip(likelihood.split(counts), greedy.split(counts), strict=True)
        ]


def likelihoods(logits: Tensor, targets: Tensor, vocabulary: Vocabulary, size: int) -> tuple[Tensor, Tensor]:
    """Return the log-likelihood of each target, in nats, and whether it is the most likely token.

    Args:
        logits: this rank's columns, ``[targets, columns]``.
        size: number of columns on all ranks together.
    """
    whole = vocabulary.gather(logits, size).float()
    return whole.log_softmax(-1).gather(-1, targets[:, None])[:, 0], whole.argmax(-1) == targets
