"""Checks of a job's parts against each other: sizes, pretrained weights, masks, mesh dimensions, unused keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from titan_core.api import (
    DATA_DIMS,
    Config,
    Job,
    LRSchedule,
    MeshDim,
    MeshView,
    Model,
    ModelDefinition,
    OptimizerSection,  # fmt: skip
    Problem,
    StoredModel,
    TextTokenizer,
    Transform,
    UserError,
)
from titan_core.api._shown import show
from titan_core.api.config.sections import DataSection, ModelSection, TrainingSection
from titan_core.config.pretrained import different_arguments
from titan_core.plugins.providers import provider
from titan_core.plugins.registry import Components
from titan_core.toolkit.errors import nearest


def check_sizes(config: Config, model: ModelDefinition, tokenizer: TextTokenizer | None) -> Iterator[Problem]:
    """Check that the sequences and the vocabulary fit the model."""
    layout = model.layout
    if config.section(TrainingSection).seq_len > layout.max_seq_len:
        yield config.problem(
            "training.seq_len",
            f"the model accepts at most {layout.max_seq_len} tokens",
            "lower it, or lengthen the model's context with model.args",
        )
    if tokenizer is not None and tokenizer.vocab_size > layout.vocab_size:
        yield config.problem(
            "model.tokenizer",
            f"its vocabulary has {tokenizer.vocab_size} tokens, but the model's has only {layout.vocab_size}",
            "choose another tokenizer or flavor, or set the model's vocabulary with model.args",
        )


def check_pretrained(config: Config, stored: StoredModel, args: BaseModel, model: Model) -> Iterator[Problem]:
    """Check that the job's model is that of the weights it starts from."""
    mine, theirs = args.model_dump(mode="json"), stored.sections[ModelSection.section]["args"]
    own, different = config.section(ModelSection).args, different_arguments(mine, theirs, model.training_only)
    shown = [f"{key} is {show(theirs[key])} and not {show(mine[key])}" for key in different]
    more = f"; and {len(shown) - 3} more" if len(shown) > 3 else ""
    if different:
        key = next((f"model.args.{key}" for key in different if key in own), "model.flavor")
        fix = "remove the key" + (', or set it to ""' if key == "model.flavor" else "")
        why = f"contradicts the weights in {stored.path}, for which {'; '.join(shown[:3])}{more}"
        yield config.problem(key, why, fix)


def pretrained_notes(stored: StoredModel, model: ModelDefinition, tokenizer: TextTokenizer) -> Iterator[str]:
    """Yield what a user should know about a pretrained model and the job's model and tokenizer."""
    yield f"starts from the weights in {stored.path}, unless the run has a checkpoint"
    if isinstance(tokenizer, MissingTokenizer):
        return
    rows, tokens, context = model.layout.vocab_size, tokenizer.vocab_size, model.layout.max_seq_len
    theirs = stored.sections[ModelSection.section]["args"].get("max_seq_len", context)
    if context != theirs:
        yield f"the model's context is {context:,} tokens; that of the weights is {theirs:,}"
    if tokens < rows:
        yield f"the model's vocabulary has {rows:,} tokens, the tokenizer's {tokens:,}: {rows - tokens:,} are unused"
    ends = sorted(tokenizer.end_ids)
    if stored.end_ids and ends != sorted(stored.end_ids):
        shown = ", ".join(map(str, sorted(stored.end_ids)))
        yield f"ids that end generated text: {shown}; ids that the tokenizer puts at the end of a document: {ends}"


_KERNEL_TYPES = ("bfloat16", "float16")


def check_document_mask(config: Config, model: ModelDefinition) -> Iterator[Problem]:
    """Check that the model can confine attention to documents, and the kernel compute it, if the config requests it."""
    data, precision = config.section(DataSection), config.section(TrainingSection).mixed_precision_param
    if data.document_attention == "varlen" and not data.document_mask:
        why = "computes attention within documents, and data.document_mask = false"
        yield config.problem("data.document_attention", why, "set data.document_mask = true, or remove the key")
    elif data.document_attention == "varlen" and precision not in _KERNEL_TYPES:
        why = f"its kernels compute in half precision, and training.mixed_precision_param = {precision!r}"
        fix = 'set that to "bfloat16", or data.document_attention = "flex"'
        yield config.problem("data.document_attention", why, fix)
    if data.document_mask and not model.layout.masks_documents:
        why = f"model {config.section(ModelSection).name!r} cannot confine attention to a document"
        fix = "set it to false, or add support to the model (masks_documents in its layout)"
        yield config.problem("data.document_mask", why, fix)


def check_param_groups(config: Config) -> Iterator[Problem]:
    """Check that each pattern can take effect."""
    groups = config.section(OptimizerSection).param_groups or []
    if len({group.pattern for group in groups}) < len(groups):
        yield config.problem("optimizer.param_groups", "contains a pattern twice, and the first always wins", "remove one")


def check_served(job: Job, active: list[Transform], registry: Components) -> Iterator[Problem]:
    """Check that a transform serves each degree above 1, mixed precision and offloading: none is silently ignored."""
    served = {key for transform in active for key in transform.served}
    named: tuple[MeshDim | MeshView, ...] = (*job.mesh.dims, *job.mesh.views)
    requested = [dim.degree_key for dim in named if job.mesh.degree(dim.name) > 1]
    training = job.section(TrainingSection)
    for key in ("mixed_precision_param", "mixed_precision_reduce", "enable_cpu_offload"):
        if getattr(training, key) != type(training).model_fields[key].default:
            requested.append(f"training.{key}")
    for key in requested:
        if key in served:
            continue
        shown = job.config.value(key)
        why = "no plugin in use provides it"
        if shown == -1:
            dim = next(dim for dim in job.mesh.dims if dim.degree_key == key)
            why = f"it takes the remaining {job.mesh.degrees[dim.name]} processes, but {why}"
        package = provider("key", key)
        yield job.config.problem(key, why, registry.remedy(package) if package else "switch its plugin on")


def check_reduced(job: Job, active: list[Transform], registry: Components) -> Iterator[Problem]:
    """Check that gradients are summed over every mesh dimension whose ranks see different tokens."""
    names = [dim.name for dim in job.mesh.dims]
    for transform in active:
        for name in {*transform.mesh.sums} - {DATA_DIMS, *names}:
            why = f"MeshUse(sums=...) has {name!r}, which is no dimension of the mesh"
            yield Problem(str(registry.origin(transform)), why, nearest(name, names))
    reduced = {name for transform in active for name in transform.mesh.sums}
    for dim in job.mesh.dims:
        served = any(dim.degree_key in transform.served for transform in active)
        if not (dim.sees_different_data and served and job.mesh.degrees[dim.name] > 1):
            continue
        if dim.name not in reduced and (dim.data_parallel == "own" or DATA_DIMS not in reduced):
            why = f"mesh dimension {dim.name!r} divides the {dim.divides} over {job.mesh.degrees[dim.name]} ranks, but no "
            why += "transform in use sums gradients over it, so the ranks' weights would diverge"
            fix = f"set it to 1, or declare MeshUse(sums=({dim.name!r},)) in the transform that sums gradients over it"
            yield job.config.problem(dim.degree_key, why, fix)


def unused_keys(config: Config, registry: Components, chosen: LRSchedule) -> list[str]:
    """Return a note for each key of the section that ``config`` sets, and that only other schedules than ``chosen`` read."""
    key_of_name = LRSchedule.keys[0]
    notes = []
    read = (schedule.config for schedule in registry.all(LRSchedule))
    for cls in dict.fromkeys(cls for cls in read if cls is not None and cls is not chosen.config and cls in config.sections):
        for (field, value), (_, default) in zip(config.section(cls), cls(), strict=True):
            key = f"{cls.section}.{field}"
            if key != key_of_name and value != default:
                notes.append(f"{key} has no effect on a schedule with {key_of_name} = {chosen.name!r}")
    return notes


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
