"""The loss on data that is not trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from titan_core.config.sections import DataSection, ValidationSection
from titan_core.data.loader import DataLoader
from titan_core.data.source import DocumentSource
from titan_core.data.stream_spec import StreamSpec
from titan_core.errors import UserError
from titan_core.job.job import Job
from titan_core.model.part import ModelPart
from titan_core.train.events import ValidationReport
from titan_core.train.step import StepRunner
from titan_core.train.world import World


class Validation:
    """Reads the same data from its beginning each time, each token of it once, whatever the mesh: a rank whose share ends
    before the others' computes on nothing until they are done, since what they compute takes all of them."""

    def __init__(
        self,
        job: Job,
        spec: StreamSpec,
        sources: Sequence[DocumentSource],
        world: World,
        parts: Sequence[ModelPart],
        run: StepRunner,
    ) -> None:
        self._job, self._spec, self._sources, self._world, self._parts, self._run = job, spec, sources, world, parts, run
        self._section = job.config.section(ValidationSection)

    def is_due(self, step: int, last: bool) -> bool:
        """Whether to validate after ``step``."""
        return last or step % self._section.freq == 0

    def measure(self, step: int) -> ValidationReport:
        """The mean loss over the target tokens of the data.

        Raises:
            UserError: the data is bad; on every rank.
        """
        started = time.perf_counter()
        document_mask = self._job.config.section(DataSection).document_mask
        loader = DataLoader(
            self._spec, self._sources, self._job.text_tokenizer, self._world.data_rank, document_mask=document_mask
        )
        loss = torch.zeros((), device=self._world.device)
        targets, batches = 0, 0
        try:
            for part in self._parts:
                part.module.eval()
            while batches != self._section.steps:
                num_targets = self._evaluate(loader, loss)
                if not num_targets:
                    break
                targets, batches = targets + num_targets, batches + 1
        finally:
            loader.close()
            for part in self._parts:
                part.module.train()
                for finish in part.after_evaluation:
                    finish()
        if not self._world.is_first_along("weights"):
            loss.zero_()  # these ranks computed the same loss as the first
        mean = float(self._world.sum(loss)) / max(targets, 1)
        return ValidationReport(step, mean, targets, batches, time.perf_counter() - started)

    def _evaluate(self, loader: DataLoader, loss: torch.Tensor) -> int:
        """Add one global batch's loss to ``loss``; its number of targets, 0 at the end."""
        data, mistake = None, None
        try:
            data = loader.next_step()
        except UserError as error:
            mistake = error
        counts = data is not None and self._world.is_first_along("layers", "sequence", "weights")
        mine = data.num_targets() if data is not None and counts else 0
        targets, mistakes = self._world.sum(torch.tensor([mine, mistake is not None])).tolist()
        if mistakes:
            self._world.raise_together(mistake)
        if targets:
            assert data is not None  # a stream that is read once gives empty rows after its end
            loss += self._run.evaluate([batch.to(self._world.device) for batch in data.microbatches])
        return int(targets)
