"""Answers of a model: log-likelihoods of given continuations, and continuations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from titan_core.api import ModelPart, Vocabulary
from titan_core.api.checkpoint.stored_model import LoadedModel
from titan_inference.generation import Generator, logits_of
from titan_inference.output import Continuation
from titan_inference.sampling import Sampler, SamplingOptions

Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Token ids of contexts and their continuations, at least one each."""


class Answers(Protocol):
    """A model on some mesh."""

    longest: int
    """Longest sequence that it computes, in tokens."""
    end_ids: frozenset[int]
    """Tokens that end a text."""

    def score(self, pairs: Pairs) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, in nats, and whether each of its tokens is the most likely one. A
        pair that is longer than the longest sequence loses its first tokens."""

    def generate(self, prompts: list[list[int]], options: SamplingOptions, most: int, stop: list[str]) -> list[str]:
        """Return the continuation of each prompt: at most ``most`` tokens, up to one of the texts in ``stop``."""


class AnswersOfStored:
    """A stored model. All ranks must ask the same, in the same order."""

    def __init__(self, loaded: LoadedModel, end_ids: Sequence[int], batch_size: int) -> None:
        """
        Args:
            end_ids: token ids that end a text, in addition to the tokenizer's.
        """
        self._loaded, self._tokenizer = loaded, loaded.job.text_tokenizer
        self.longest = loaded.part.layout.max_seq_len
        self.end_ids = frozenset({*end_ids, *self._tokenizer.end_ids})
        self.score = Scorer(loaded.part, loaded.world.device, batch_size).score

    def generate(self, prompts: list[list[int]], options: SamplingOptions, most: int, stop: list[str]) -> list[str]:
        """See :class:`Answers`."""
        world = self._loaded.world
        generator = Generator(self._loaded.part, world.device, self._tokenizer.vocab_size, world.broadcast)
        texts = [Continuation(self._tokenizer, self.end_ids, stop) for _ in prompts]
        return continued(generator, prompts, Sampler(options), min(most, self.longest - 1), texts)


def continued(
    generator: Generator, prompts: list[list[int]], sampler: Sampler, most: int, texts: list[Continuation]
) -> list[str]:
    """Return the continuations of ``prompts``, each of which ``texts`` ends."""
    for _ in generator.generate(prompts, sampler, most, lambda index, token: texts[index].add(token)):
        pass
    for text in texts:
        text.finish()
    return [text.text for text in texts]


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
