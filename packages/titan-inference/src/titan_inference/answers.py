"""What a model answers: likelihoods of continuations, and continuations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from titan_core.toolkit.jobs import LoadedModel
from titan_inference.generation import Generator
from titan_inference.output import Continuation
from titan_inference.sampling import Sampler, SamplingOptions
from titan_inference.scoring import Scorer

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
