"""Answers of a model while it trains, on any mesh: continuations are scored by the forward pass of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_core.api import Batch, ObjectiveFunction, Run, Vocabulary
from titan_core.api.config.sections import DataSection
from titan_inference.answers import Pairs, continued, likelihoods
from titan_inference.generation import Generator
from titan_inference.output import Continuation
from titan_inference.sample import obstacle_to_sampling, padded
from titan_inference.sampling import Sampler, SamplingOptions

IGNORE = -100
"""Target of a position without a loss."""


class Unanswerable(Exception):
    """The mesh cannot answer the request."""


class Likelihoods(ObjectiveFunction):
    """Sums the log-likelihoods of the targets of each row, and counts those that are not the most likely token."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        """
        Args:
            rows: number of rows of the global batch.
            columns: number of columns of the logits on all ranks together.
        """
        self.sums = torch.zeros(rows, 2, dtype=torch.float64, device=device)
        """Log-likelihood and number of other tokens of each row, of this rank's share of the batch."""
        self._columns = columns

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`."""
        wanted = batch.targets != IGNORE
        assert batch.rows is not None
        rows = batch.rows[:, None].expand_as(wanted)[wanted]
        likelihood, greedy = likelihoods(logits[wanted], batch.targets[wanted], vocabulary, self._columns)
        self.sums.index_add_(0, rows, torch.stack([likelihood.double(), (~greedy).double()], dim=1))
        return -likelihood.sum()


class AnswersInTraining:
    """The model of a run. Rank 0 asks, and the other ranks :meth:`serve` it: what only rank 0 does, such as reading the data
    of a task, may take any time, and may fail."""

    def __init__(self, run: Run) -> None:
        """All ranks must call it."""
        self._run, self._plan = run, run.job.batch
        self._group = run.world.new_background_group()
        self.longest = self._plan.seq_len
        self.end_ids = frozenset(run.job.text_tokenizer.end_ids)
        self._answers: dict[str, Callable[..., Any]] = {"score": self._score, "generate": self._generate}
        self.failed = False
        """Whether a computation of the mesh failed, after which ranks no longer agree on what comes next."""

    def score(self, pairs: Pairs) -> list[tuple[float, bool]]:
        """See :class:`~titan_inference.answers.Answers`."""
        found: list[tuple[float, bool]] = self._together("score", [(list(one), list(other)) for one, other in pairs])
        return found

    def generate(self, prompts: list[list[int]], options: SamplingOptions, most: int, stop: list[str]) -> list[str]:
        """See :class:`~titan_inference.answers.Answers`.

        Raises:
            Unanswerable: the mesh divides what generation needs whole.
        """
        if obstacle := obstacle_to_sampling(self._run.job):
            raise Unanswerable(f"it generates text, and {obstacle}")
        texts: list[str] = self._together("generate", prompts, options, most, stop)
        return texts

    def serve(self) -> None:
        """Take part in what rank 0 asks, until it calls :meth:`end`."""
        while (request := self._sent(None)) is not None:
            name, arguments = request
            self._answers[name](*arguments)

    def end(self) -> None:
        """Let the other ranks return from :meth:`serve`."""
        self._sent(None)

    def _together(self, name: str, *arguments: Any) -> Any:
        self._sent((name, arguments))
        self.failed = True
        answer = self._answers[name](*arguments)
        self.failed = False
        return answer

    def _sent(self, request: Any) -> Any:
        """Return the request of rank 0 on every rank."""
        box = [request]
        dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return box[0]

    def _score(self, pairs: Pairs) -> list[tuple[float, bool]]:
        rows = self._plan.global_size
        parts = [self._score_rows(pairs[first : first + rows]) for first in range(0, len(pairs), rows)]
        return [one for part in parts for one in part]

    def _score_rows(self, pairs: Pairs) -> list[tuple[float, bool]]:
        """Score at most as many pairs as the global batch has rows. Rows have the length of training's."""
        world, plan, run = self._run.world, self._plan, self._run
        share = plan.local_size * plan.microbatches
        first = world.data_rank * share
        batches = self._batch(pairs[first : first + share], first, share).split(plan.local_size)
        objective = Likelihoods(plan.global_size, run.job.model.layout.vocab_size, world.device)
        run.compute([batch.to(world.device) for batch in batches], objective)
        if not world.is_first_along("weights"):
            objective.sums.zero_()  # these ranks computed the same as the first
        sums = world.sum(objective.sums)[: len(pairs)].tolist()
        return [(likelihood, others == 0) for likelihood, others in sums]

    def _batch(self, pairs: Pairs, first: int, rows: int) -> Batch:
        """Return ``rows`` rows, from number ``first`` of the global batch on: ``pairs``, and padding."""
        tokens = torch.zeros(rows, self.longest, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORE)
        for index, (context, continuation) in enumerate(pairs):
            row = torch.tensor([*context, *continuation][-(self.longest + 1) :])
            end = len(row) - 1
            begin = max(0, end - len(continuation))
            tokens[index, :end] = row[:-1]
            targets[index, begin:end] = row[begin + 1 :]
        numbers = torch.arange(first, first + rows)
        if not self._run.job.section(DataSection).document_mask:
            return Batch(tokens, targets, rows=numbers)
        positions = torch.arange(self.longest).expand_as(tokens).contiguous()
        return Batch(tokens, targets, rows=numbers, positions=positions, documents=torch.zeros_like(tokens))

    def _generate(self, prompts: list[list[int]], options: SamplingOptions, most: int, stop: Sequence[str]) -> list[str]:
        run, tokenizer = self._run, self._run.job.text_tokenizer
        (part,) = run.parts
        generator = Generator(
            part, run.world.device, tokenizer.vocab_size, run.world.broadcast, use_cache=False,
            padded=partial(padded, run.job),
        )  # fmt: skip
        texts = [Continuation(tokenizer, self.end_ids, stop) for _ in prompts]
        room = self.longest - max(map(len, prompts))
        return continued(generator, prompts, Sampler(options), min(most, room), texts)
