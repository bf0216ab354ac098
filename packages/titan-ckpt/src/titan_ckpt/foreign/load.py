"""Loading weights in another format into a job's model. Each rank reads only its own shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from titan_ckpt.all_ranks import on_all_ranks
from titan_ckpt.contents.tensors import model_tensors, require_patterns_match, without_absent
from titan_ckpt.foreign.arrangement import read
from titan_ckpt.foreign.checks import as_named_in, declared_tensors, require_equal_copies, require_weights
from titan_ckpt.foreign.config import CONFIG_OF, DOWNLOAD_AGAIN, accepting, formats_of, kind_of, owner, read_config
from titan_ckpt.foreign.files import ForeignFiles, open_files
from titan_ckpt.format.chunks import local
from titan_ckpt.format.dtypes import dtype_name
from titan_ckpt.format.reader import first_index
from titan_ckpt.format.stored import MODEL
from titan_core.api import ForeignTensor, ModelPart, UserError, World, matches
from titan_core.api.plugins.assembled_job import AssembledJob


def load_foreign(
    job: AssembledJob, world: World, parts: Sequence[ModelPart], path: Path, excluded: Sequence[str] = (), key: str = ""
) -> None:
    """Load the weights in ``path`` into the model, except those that match ``excluded``.

    Args:
        key: the config key that names ``path``, for errors.

    Raises:
        UserError: the weights are not those of this job's model; on every rank.
    """
    names = [name for of_rank in world.gather(list(model_tensors(parts))) for name in of_rank]
    require_patterns_match(job, excluded, names, str(path))
    where = job.config.where(key, str(path)) if key else str(path)
    opened, _ = on_all_ranks(lambda: _open(job, world, parts, path, excluded, where), world)
    assert opened is not None
    on_all_ranks(lambda: _read(*opened), world)


def _open(
    job: AssembledJob, world: World, parts: Sequence[ModelPart], path: Path, excluded: Sequence[str], where: str
) -> tuple[ForeignFiles, dict[str, tuple[Tensor, ForeignTensor, tuple[int, ...]]]]:
    """Return the arguments of :func:`_read`.

    Raises:
        UserError: the weights are not those of this job's model.
    """
    kind = kind_of(path)
    if kind is None:
        raise UserError.one(where, "contains no weights", DOWNLOAD_AGAIN)
    config = read_config(path, kind)
    forms = [(job.family, form) for form in formats_of(job.family, kind)]
    if not forms:
        raise UserError.one(
            where, f"model {job.model_name!r} does not support {kind!r} files", "convert the weights to a supported format"
        )
    reasons: list[str] = []
    accepted = accepting(forms, config, where, reasons)
    if accepted is None:
        why = f"{CONFIG_OF[kind]} does not describe this job's model: {'; '.join(reasons)}"
        raise UserError.one(where, why, "use weights of this model")
    _, form, theirs = accepted
    args = job.model_args
    # max_seq_len does not affect weights.
    differences = [
        f"{key} is {value!r} in its {CONFIG_OF[kind]} and {wanted_value!r} in this job"
        for (key, value), (_, wanted_value) in zip(theirs, args, strict=True)
        if value != wanted_value and key != "max_seq_len" and (key, wanted_value) not in job.family.training_only.items()
    ]
    if differences:
        raise UserError.one(where, "; ".join(differences), "set model.flavor and model.args to the model of these weights")
    tensors = model_tensors(parts)
    tensors = {name: tensor for name, tensor in tensors.items() if not matches(name, excluded)}
    files = open_files(path, kind)
    declared = as_named_in(files, declared_tensors(form, theirs, job.model_name), where)
    foreign = {f"{MODEL}.{tensor.parameter}": tensor for tensor in declared if not tensor.copy}
    tensors = without_absent(job, tensors, foreign)
    unknown = [name for name in tensors if name not in foreign]
    if unknown:
        why = f"declares no {kind!r} tensor for {unknown[0]}, which {where} may have"
        fix = "add it to its WeightFormat, or the name to checkpoint.exclude_from_loading"
        raise UserError.one(str(form.tensors.origin or f"model {job.model_name!r}"), why, fix)
    wanted = {
        name.removeprefix(f"{MODEL}."): (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()
    }
    require_weights(files, declared, wanted, form.ignored, where, f"{owner(job.family)}, format {kind!r}")
    if world.rank == 0:  # on one rank only, because it reads whole tensors
        require_equal_copies(files, declared, where)
    return files, {name: (tensor, foreign[name], tuple(tensor.shape)) for name, tensor in tensors.items()}


def _read(files: ForeignFiles, wanted: Mapping[str, tuple[Tensor, ForeignTensor, tuple[int, ...]]]) -> None:
    """Read this rank's shards in place.

    Args:
        wanted: the tensors to load into, by name, each with its foreign tensor and the shape of the whole parameter.
    """
    for tensor, foreign, shape in wanted.values():
        target = local(tensor.detach())
        if target.numel():
            target.copy_(read(files, foreign, shape, first_index(tensor), target.shape))
