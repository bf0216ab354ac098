"""Generating tokens with a model, one position after another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from titan_core.api import Decoding, ModelPart
from titan_inference.sampling import Sampler

log = logging.getLogger(__name__)

PREFILL_TOKENS = 512
"""Positions of a prompt that are computed at a time: the logits of a whole long prompt would need gigabytes."""


class Generator:
    """Continues prompts with a model that is whole, or divided by tensor parallelism or FSDP."""

    def __init__(
        self,
        part: ModelPart,
        device: torch.device,
        vocab_size: int,
        share: Callable[[Tensor], Tensor],
        use_cache: bool = True,
        padded: Callable[[int], int] = lambda length: length,
    ) -> None:
        """
        Args:
            vocab_size: number of token ids to choose from: the tokenizer's. Models often have more columns than that.
            share: returns rank 0's value of a tensor of chosen tokens on every rank, so that rounding cannot part ranks.
            use_cache: whether to keep keys and values. A model that cannot is computed without, and a warning says so.
            padded: without a cache, the number of positions to compute for sequences of a length.
        """
        self._part, self._device, self._share, self._vocab_size = part, device, share, vocab_size
        self._use_cache, self._padded = use_cache, padded

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampler: Sampler,
        max_new_tokens: int,
        accept: Callable[[int, int], bool],
    ) -> Iterator[None]:
        """Generate a token for every sequence that has not ended, until all have; yield after each step.

        Args:
            prompts: token ids, at least one each.
            accept: (index of the prompt, token) -> whether the sequence continues. Called for each new token, alike on all
                ranks.
        """
        sequences = [list(prompt) for prompt in prompts]
        running = set(range(len(sequences)))
        run: _Model = _Incremental(self._part, self._device, len(sequences), max(map(len, sequences)) + max_new_tokens)
        if not self._use_cache:
            run = _Whole(self._part, self._device, self._padded)
        for _ in range(max_new_tokens):
            logits = run.next_logits(sequences)
            if isinstance(run, _Incremental) and not run.works:
                log.warning("the model's mixers keep no keys and values: every token computes the whole sequence again")
                run = _Whole(self._part, self._device, self._padded)
                logits = run.next_logits(sequences)
            logits = self._part.vocabulary.gather(logits, self._part.layout.vocab_size)
            chosen = self._share(sampler(logits[:, : self._vocab_size], [len(sequence) for sequence in sequences])).tolist()
            for index, token in enumerate(chosen):
                sequences[index].append(token)
                if index in running and not accept(index, token):
                    running.discard(index)
            yield
            if not running:
                return


class _Model(Protocol):
    def next_logits(self, sequences: list[list[int]]) -> Tensor:
        """Logits of the token that follows each sequence, ``[batch, vocab]``."""
        ...


class _Whole:
    """Computes the whole sequences for each new token."""

    def __init__(self, part: ModelPart, device: torch.device, padded: Callable[[int], int]) -> None:
        self._part, self._device, self._padded = part, device, padded

    def next_logits(self, sequences: list[list[int]]) -> Tensor:
        """Logits of the token that follows each sequence, ``[batch, vocab]``."""
        length = self._padded(max(map(len, sequences)))
        tokens = torch.tensor([sequence + [0] * (length - len(sequence)) for sequence in sequences], device=self._device)
        positions = torch.arange(length, device=self._device).expand(len(sequences), length)
        logits = logits_of(self._part, tokens, positions)
        last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=self._device)
        return logits[torch.arange(len(sequences), device=self._device), last]


class _Incremental:
    """Computes each position once."""

    def __init__(self, part: ModelPart, device: torch.device, sequences: int, length: int) -> None:
        self._part, self._device = part, device
        self._decoding = Decoding(sequences, length)
        self._computed = 0

    @property
    def works(self) -> bool:
        """Whether every mixer of the model has cached what it computed."""
        layout = self._part.layout
        mixers = {module for name, module in self._part.named_modules() if layout.mixer(name) is not None}
        return bool(mixers) and mixers == self._decoding.mixers

    def next_logits(self, sequences: list[list[int]]) -> Tensor:
        """Logits of the token that follows each sequence, ``[batch, vocab]``."""
        ends = [len(sequence) for sequence in sequences]
        if self._computed:
            tokens = torch.tensor([sequence[-1:] for sequence in sequences], device=self._device)
            positions = torch.tensor([[end - 1] for end in ends], device=self._device)
            with self._decoding.computing(positions, max(ends)):
                return logits_of(self._part, tokens, positions)[:, -1]
        found: list[Tensor | None] = [None] * len(sequences)
        lengths = torch.tensor(ends, device=self._device)
        for first in range(0, max(ends), PREFILL_TOKENS):
            end = min(first + PREFILL_TOKENS, max(ends))
            tokens = torch.tensor(
                [(sequence[first:end] + [0] * (end - first))[: end - first] for sequence in sequences], device=self._device
            )
            positions = torch.arange(first, end, device=self._device).expand(len(sequences), end - first)
            with self._decoding.computing(positions, end, lengths):
                logits = logits_of(self._part, tokens, positions)
            for index, last in enumerate(ends):
                if first < last <= end:
                    found[index] = logits[index, last - 1 - first].clone()
        self._computed = max(ends)
        return torch.stack([one for one in found if one is not None])


def logits_of(part: ModelPart, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the columns of the logits that this rank computes, ``[batch, seq, columns]``."""
    logits: Tensor = part.module(tokens, positions=positions)
    return logits
