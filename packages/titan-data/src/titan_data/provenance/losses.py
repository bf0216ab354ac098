"""The loss of each document of a step, computed with the weights of the newest checkpoint before it.

The step is computed again, forward only and on one device, as training computes it: in its sequences, in training mode and
with the step's random draws. The objective then receives the positions of each document apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titan_core.api import Batch, CommandContext, Microbatch, ObjectiveFunction, StoredModel, UserError, Vocabulary
from titan_core.api.checkpoint.stored_model import LoadedModel
from titan_core.api.config.sections import TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.training.batch import IGNORE
from titan_core.toolkit.reading import StepRows
from titan_data.provenance.documents import Note, UsedDocument, rows_of_steps, used_documents
from titan_data.provenance.recorded_run import RecordedRun, Segment


@dataclass(frozen=True)
class DocumentLoss:
    """The loss of successive tokens of a document in a sequence of a step: of those that are targets."""

    document: UsedDocument
    total: float
    """Sum of the losses of its targets, each multiplied by its weight."""
    targets: int
    """Number of its targets. The first token of a sequence is none; nor is that of a document, under a document mask."""
    weight: float
    """Total weight of its targets: their number, unless the dataset weights them."""

    @property
    def mean(self) -> float | None:
        """The loss per target, in nats for ``next_token``; ``None`` if it has no targets."""
        return self.total / self.weight if self.weight else None


@dataclass(frozen=True)
class StepLosses:
    """The losses of the documents of a step."""

    documents: Sequence[DocumentLoss]
    """In the order of :func:`~titan_data.provenance.documents.documents_of_step`."""
    weights_of: int
    """The weights with which they were computed are those after this step."""

    @property
    def mean(self) -> float | None:
        """The loss of the global batch; ``None`` if it has no targets. It is that of training if the weights are those after
        the step before."""
        weight = sum(one.weight for one in self.documents)
        return sum(one.total for one in self.documents) / weight if weight else None


def losses_of_step(context: CommandContext, run: RecordedRun, step: int, note: Note = lambda line: None) -> StepLosses:
    """Return the loss of each document of ``step``.

    Raises:
        UserError: the run has no checkpoint before the step; its objective has no loss of single tokens; this machine
            cannot compute its model; or see :func:`~titan_data.provenance.documents.rows_of_steps`.
    """
    job = run.segment_of(step).job
    if job.objective.reference is not None:
        raise _no_token_loss(job, "compares with a reference model, which only training builds")
    saved = run.checkpoint_before(step)
    if saved is None or saved.checkpoint is None:
        why = f"the run has no checkpoint of a step before {step}, so the weights are not known"
        raise UserError.one("--loss", why, "name a step after a checkpoint (`titan checkpoint list`)")
    ((_, segment, rows),) = rows_of_steps(run, step, step, note)
    documents = list(used_documents(segment, rows))
    stored = _as_trained(context.models.find(saved.checkpoint), job)
    with context.models.open(context.models.job(stored, 1, _on_one_device(job)), stored) as loaded:
        return StepLosses(_compute(loaded, segment, step, rows, documents), saved.step)


def _as_trained(stored: StoredModel, job: AssembledJob) -> StoredModel:
    """Return ``stored`` as a model with the arguments of ``job``, which may begin a stage with those weights."""
    args = job.model_args.model_dump(mode="json")
    return replace(stored, sections={**stored.sections, "model": {**stored.sections["model"], "args": args}})


def _on_one_device(job: AssembledJob) -> Mapping[str, Mapping[str, Any]]:
    """Return the config of ``job``, for one rank that computes its model."""
    sections = {name: dict(table) for name, table in job.config.as_dict().items() if name != "model"}
    for degree_key in [dim.degree_key for dim in job.mesh.dims] + [view.degree_key for view in job.mesh.views]:
        name, _, key = degree_key.partition(".")
        sections[name][key] = 1
    sections["training"]["global_batch_size"] = job.batch.global_size  # which may follow from the number of ranks
    return sections


def _compute(
    loaded: LoadedModel, segment: Segment, step: int, rows: StepRows, documents: Sequence[UsedDocument]
) -> list[DocumentLoss]:
    part, seed = loaded.part, segment.job.section(TrainingSection).seed
    if not part.objective.per_position:
        raise _no_token_loss(segment.job, "is a function of whole sequences")
    sums = _Sums(part.objective, documents, loaded.world.device)
    part.objective = sums
    part.module.train()  # for the dropout of training, which is a function of seed and step
    with torch.compiler.set_stance("force_eager"):  # documents have all lengths, for each of which it would compile
        for batch in segment.replay.batch(rows).split(segment.job.data.plan.local_size):
            part.forward_loss(Microbatch(batch.to(loaded.world.device), step, seed))
    return sums.losses()


def _no_token_loss(job: AssembledJob, why: str) -> UserError:
    where = job.config.where("objective.name", job.objective.name)
    return UserError.one(where, f"{why}: it has no loss of single documents", "drop --loss")


class _Sums(ObjectiveFunction):
    """Adds up an objective over the positions of each document, wherever the model computes its loss in chunks."""

    def __init__(self, objective: ObjectiveFunction, documents: Sequence[UsedDocument], device: torch.device) -> None:
        self.vocabulary_sharded = objective.vocabulary_sharded
        self._objective, self._documents = objective, documents
        self._sums = torch.zeros(len(documents), 3, dtype=torch.float64, device=device)  # loss, targets, their weight
        self._of_rows: dict[int, list[tuple[int, int, int]]] = {}
        for number, one in enumerate(documents):
            row = self._of_rows.setdefault(one.row, [])
            first = row[-1][2] if row else 0
            row.append((number, first, first + one.tokens))

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`."""
        assert batch.rows is not None
        begin, positions = 0 if batch.columns is None else int(batch.columns[0, 0]), batch.tokens.shape[1]
        for index, row in enumerate(batch.rows.tolist()):
            for number, first, end in self._of_rows.get(row, ()):
                # The target of a position is the token after it.
                chosen = slice(max(first - 1 - begin, 0), min(max(end - 1 - begin, 0), positions))
                if chosen.start < chosen.stop:
                    one = batch.map(lambda tensor, index=index: tensor[index : index + 1])  # type: ignore[misc]
                    one = one.map_sequence(lambda tensor, chosen=chosen: tensor[:, chosen])  # type: ignore[misc]
                    self._add(number, logits[index : index + 1, chosen], one, vocabulary)
        return logits.new_zeros((), dtype=torch.float32)

    def _add(self, number: int, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> None:
        targets = (batch.targets != IGNORE).sum()
        weight = batch.target_weights().sum(dtype=torch.float64)
        self._sums[number] += torch.stack([self._objective(logits, batch, vocabulary).double(), targets.double(), weight])

    def losses(self) -> list[DocumentLoss]:
        """Return the losses of the documents, in order."""
        return [
            DocumentLoss(document, total, round(targets), weight)
            for document, (total, targets, weight) in zip(self._documents, self._sums.tolist(), strict=True)
        ]
