"""Validation: the loss on data that is not trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titan_core.api import (
    DocumentSource,
    ModelPart,
    SharedRequest,
    StepInput,
    StepRunner,
    UserError,
    ValidationReport,
    World,
)
from titan_core.api.config.sections import DataSection, TrainingSection, ValidationSection
from titan_core.api.data.dataset import StreamSpec
from titan_core.api.observe.shared_request import SharedRequests
from titan_core.api.parallel.microbatch import MetricSums
from titan_core.api.parallel.model_part import require_scalar
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.data.loader import DataLoader
from titan_core.loop.lookahead import Lookahead
from titan_core.loop.losses import MetricMeans
from titan_core.model.preserved import preserved_state
from titan_core.toolkit.device import synchronize
from titan_core.toolkit.status import phase


@dataclass(frozen=True)
class _Measured:
    """What a validation on one dataset has summed over all ranks, or on this rank."""

    loss: float
    """Sum of all ranks' losses."""
    weight: float
    """Sum of the weights of all ranks' targets."""
    targets: int
    """Number of all ranks' targets."""
    batches: int
    """Number of global batches."""
    metrics: MetricSums
    """This rank's metrics."""
    seconds: float


class Validation:
    """Reads the same data from its beginning each time, each token once, on any mesh. A rank whose share ends early
    continues with empty batches, because the collectives of the other ranks need it."""

    def __init__(
        self,
        job: AssembledJob,
        spec: StreamSpec,
        sources: Sequence[DocumentSource],
        world: World,
        parts: Sequence[ModelPart],
        run: StepRunner,
        stop: SharedRequest,
    ) -> None:
        """
        Args:
            spec: one dataset, or several, which are read one after another.
            sources: of each dataset.
        """
        self._metric_means = MetricMeans(world, parts)
        self._job, self._world, self._parts, self._run = job, world, parts, run
        self._sets = [
            (replace(spec, datasets=(dataset,)), [source]) for dataset, source in zip(spec.datasets, sources, strict=True)
        ]
        self._section = job.config.section(ValidationSection)
        self._stop = stop
        self._measured: int | None = None
        self._progress = ""

    def is_due(self, step: int, last: bool = False) -> bool:
        """Return whether to validate after ``step``."""
        return self._measured != step and (last or step % self._section.freq == 0)

    def measure(self, step: int, name: str = "") -> list[ValidationReport]:
        """Return the mean loss over the target tokens of all data, as a report called ``name``; if there are several
        datasets, also that of each. Empty if a rank received a stop request meanwhile.

        Raises:
            UserError: the data is invalid, or a dataset has no targets. Raised on every rank.
        """
        found = []
        for spec, sources in self._sets:
            if (one := self._on(spec, sources, step)) is None:
                return []
            found.append(one)
        self._measured = step
        reports = [self._report(step, name, found)]
        if len(found) > 1:
            datasets = [spec.datasets[0].name for spec, _ in self._sets]
            reports += [self._report(step, name, [one], dataset) for dataset, one in zip(datasets, found, strict=True)]
        return reports

    def _report(self, step: int, name: str, found: Sequence[_Measured], dataset: str = "") -> ValidationReport:
        metrics = MetricSums()
        for one in found:
            for metric, sums in one.metrics.values.items():
                metrics.add(metric, sums)
        return ValidationReport(
            step,
            sum(one.loss for one in found) / sum(one.weight for one in found),
            sum(one.targets for one in found),
            sum(one.batches for one in found),
            sum(one.seconds for one in found),
            {metric: value.item() for metric, value in self._metric_means(metrics).items()},
            name,
            dataset,
        )

    def _on(self, spec: StreamSpec, sources: Sequence[DocumentSource], step: int) -> _Measured | None:
        """Measure the loss on one dataset; ``None`` if the run must stop."""
        synchronize(self._world.device)  # pending training work must not count as validation time
        started = time.perf_counter()
        section = self._job.config.section(DataSection)
        loader = DataLoader(
            spec,
            sources,
            self._job.text_tokenizer,
            self._world.data_rank,
            document_mask=section.document_mask,
            document_ends=section.document_attention == "varlen",
            pin=self._world.device.type == "cuda",
        )
        self._progress = ""
        try:
            with preserved_state(self._parts), phase("validating", lambda: self._progress, repeat_seconds=60.0):
                for part in self._parts:
                    part.module.eval()
                measured = self._sum(loader, step)
        finally:
            loader.close()
        if measured is None:
            return None
        loss, weight, targets, batches, metrics = measured
        if not self._world.is_first_along("weights"):
            loss.zero_()  # these ranks computed the same loss as the first
        if not weight:
            dataset = spec.datasets[0].name
            raise UserError.one(f"validation dataset {dataset!r}", "has no target tokens", "add longer documents")
        total = float(self._world.sum(loss))
        return _Measured(total, weight, targets, batches, metrics, time.perf_counter() - started)

    def _sum(self, loader: DataLoader, step: int) -> tuple[Tensor, float, int, int, MetricSums] | None:
        """Return the sum of this rank's losses, the weight and the number of all ranks' targets, the number of global
        batches, and this rank's metrics; ``None`` if the run must stop."""
        loss = torch.zeros((), device=self._world.device)
        seed = self._job.config.section(TrainingSection).seed
        weight, targets, batches, metrics = 0.0, 0, 0, MetricSums()
        stop = SharedRequest()  # a separate request: agreeing on the original would hide it from the next training step
        lookahead = Lookahead(loader, self._world, SharedRequests([stop]), datasets=1)
        most = self._section.steps
        stop.pending = self._stop.pending
        while batches != most:
            totals = lookahead.take()
            if stop.agreed:
                return None
            data = loader.next_step()
            if not totals.num_targets or data is None:
                break
            if batches + 1 != most:  # exchanged while this batch is computed
                stop.pending = self._stop.pending
                lookahead.begin(skipped=lambda: False)
            batches_here = [batch.to(self._world.device) for batch in data.microbatches]
            loss += require_scalar(self._run.evaluate(StepInput(batches_here, step, seed, metrics=metrics)), self._run)
            weight, targets, batches = weight + totals.weight, targets + totals.num_targets, batches + 1
            self._progress = f"{targets:,} tokens" + (f", batch {batches} of {most}" if most > 0 else "")
        return loss, weight, targets, batches, metrics
