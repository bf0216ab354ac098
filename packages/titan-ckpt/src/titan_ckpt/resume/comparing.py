"""Comparing a job with the run whose checkpoint it resumes from."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_ckpt.format.dtypes import converts_exactly, dtype_name
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.stored import MODEL, OBSERVERS, Manifest
from titan_ckpt.resume.config_changes import ConfigChange, config_changes, decisive_keys
from titan_core.api import ChatTokenizer, Problem, RefusedChange, TextTokenizer, UserError, World, matches
from titan_core.api.checkpoint.store import refused_changes
from titan_core.api.config.sections import TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.text import show

log = logging.getLogger(__name__)

_ARGS = "model.args."
_BATCH = "training.global_batch_size"
_RATES = (
    "lr_scheduler.*", "training.steps", "training.global_batch_size", "training.seq_len",
    "optimizer.lr", "optimizer.name", "optimizer.param_groups",
)  # fmt: skip
"""Keys that the learning rate at a step depends on; schedules by tokens depend on the batch."""


@dataclass(frozen=True)
class Changes:
    """Accepted differences between a job and the saved run."""

    config: tuple[ConfigChange, ...]
    allowed: tuple[str, ...]
    """Patterns of ``checkpoint.allow_changed``."""

    @property
    def schedule(self) -> bool:
        """Whether the learning rates follow another schedule than before."""
        return any(matches(change.key, _RATES) for change in self.config)

    @property
    def frozen(self) -> bool:
        """Whether other parameters are frozen than before."""
        return any(change.key == "training.freeze" for change in self.config)

    def accepts_group_value(self, key: str) -> bool:
        """Whether parameter groups may have another value of ``key`` than before."""
        if any(change.key.startswith("optimizer.") and change.decisive for change in self.config):
            return True
        implementation = any(change.key == "optimizer.implementation" for change in self.config)
        return (implementation and key in ("fused", "foreach")) or matches(f"optimizer.groups.{key}", self.allowed)


def require_same_training(
    job: AssembledJob, about: Mapping[str, Any], step: int, allowed: Sequence[str], others: Sequence[RefusedChange] = ()
) -> Changes:
    """Compare the job with the run that the manifest describes, and log the accepted changes.

    Args:
        about: ``about`` of the manifest.
        step: step of the checkpoint, for messages.
        allowed: patterns of keys that may change.
        others: refused changes found elsewhere (in the data), to report with those found here.

    Raises:
        UserError: keys changed that may not. The message names all of them, and one list that allows them.
    """
    found = config_changes(about.get("config", {}), about.get("decisive", ()), job.config, job.mesh.degree_keys)
    changes = {change.key: change for change in found}
    changes |= {change.key: change for change in _resolved_changes(job, about)}
    decisive = [change for change in changes.values() if change.decisive and not matches(change.key, allowed)]
    refused = [RefusedChange(change.key, _problem(job, change, step)) for change in decisive]
    known = {change.key for change in refused}
    refused += [change for change in others if change.key not in known]
    if refused:
        raise refused_changes(refused, allowed)
    by_argument = any(key.startswith(_ARGS) for key in changes)
    for change in changes.values():
        if not (by_argument and change.key == "model.args"):  # the arguments that differ are named one by one
            log.info("changed since the checkpoint of step %d: %s", step, change)
    if "training.steps" in changes:
        log.warning(
            "from now on the learning rate follows the schedule for %s steps", job.config.section(TrainingSection).steps
        )
    plugins: dict[str, str] = {**about.get("plugins", {}), "torch": about.get("torch", "")}
    now = {**job.identity()["plugins"], "torch": torch.__version__}
    for name in dict.fromkeys([*plugins, *now]):
        if plugins.get(name) != now.get(name):
            versions = plugins.get(name, "none"), now.get(name, "none")
            log.info("changed since the checkpoint of step %d: %s %s -> %s", step, name, *versions)
    return Changes(tuple(changes.values()), tuple(allowed))


def require_same_model(job: AssembledJob, about: Mapping[str, Any], allowed: Sequence[str], partial: bool) -> None:
    """Compare the job's model arguments with those of the run whose weights it starts from: models whose weights have equal
    shapes may still compute differently (``rope_theta``). ``max_seq_len`` may differ, because it does not affect weights.

    Args:
        about: ``about`` of the manifest.
        allowed: patterns of arguments that may differ.
        partial: whether some weights are excluded, so that the model's shapes may differ too; differences are then logged.

    Raises:
        UserError: arguments differ that may not. The message names all of them.
    """
    if "model_args" not in about:
        return
    changes = [
        change
        for change in _resolved_changes(job, about)
        if change.key.startswith(_ARGS) and change.key != f"{_ARGS}max_seq_len"
    ]
    refused = [
        RefusedChange(
            change.key,
            Problem(
                job.config.where(change.key, change.now),
                f"the weights in checkpoint.initial_load_path are of a model with {show(change.before)}",
                "set it to that value",
            ),
        )
        for change in changes
        if not partial and not matches(change.key, allowed)
    ]
    if refused:
        raise refused_changes(refused, allowed)
    for change in changes:
        log.warning("the model differs from that of the weights: %s", change)


def resolved(job: AssembledJob) -> dict[str, Any]:
    """Return values that follow from the config, and that different configs may agree on."""
    args = job.model_args.model_dump(mode="json")
    return {"model_args": args, "global_batch_size": job.batch.global_size}


def _resolved_changes(job: AssembledJob, about: Mapping[str, Any]) -> list[ConfigChange]:
    now = resolved(job)
    before, after = _flat({**_defaults(job), **about.get("model_args", {})}, _ARGS), _flat(now["model_args"], _ARGS)
    pairs = [(key, before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])]
    batch = about.get("global_batch_size")
    if batch is not None:
        pairs.append((_BATCH, batch, now["global_batch_size"]))
    return [ConfigChange(key, old, new, decisive=True) for key, old, new in pairs if old != new]


def _defaults(job: AssembledJob) -> dict[str, Any]:
    """Return the default values of the model's arguments, for arguments that an older version of the model did not have."""
    fields = type(job.model_args).model_fields.items()
    plain = {name: field.get_default(call_default_factory=True) for name, field in fields if not field.is_required()}
    defaults: dict[str, Any] = json.loads(json.dumps(plain, default=lambda value: value.model_dump(mode="json")))
    return defaults


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _problem(job: AssembledJob, change: ConfigChange, step: int) -> Problem:
    why = f"the checkpoint of step {step} was saved with {show(change.before)}, and this key affects what is trained"
    return Problem(job.config.where(change.key, change.now), why, "restore the saved value")


def require_same_tensors(
    job: AssembledJob,
    world: World,
    folder: Folder,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    excluded: Sequence[str] = (),
    exact: bool = False,
) -> None:
    """Require the tensors of the job and of the checkpoint to have the same names, shapes and dtypes.

    Args:
        exact: whether dtypes must be equal; otherwise it is enough that the conversion to the model's dtype is lossless.

    Raises:
        UserError: tensors differ; on every rank. The message names the first few.
    """
    in_job: dict[str, tuple[tuple[int, ...], str]] = {}
    described = {name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()}
    for on_rank in world.gather(described):
        in_job |= on_rank
    differences = []
    for name, (shape, dtype) in in_job.items():
        stored = manifest.tensors.get(name)
        if stored is None:
            differences.append(f"{name} is not in the checkpoint")
        elif stored.shape != shape:
            differences.append(f"{name} has shape {list(stored.shape)} in the checkpoint and {list(shape)} in this job")
        elif stored.dtype != dtype and (exact or not converts_exactly(stored.dtype, dtype)):
            differences.append(f"{name} is {stored.dtype} in the checkpoint and {dtype} in this job")
    prefixes = (f"{MODEL}.", f"{OBSERVERS}.") if exact else (f"{MODEL}.",)
    saved_names = (name for name in manifest.tensors if name.startswith(prefixes))
    differences += [
        f"{name} is not in this job" for name in saved_names if name not in in_job and not matches(name, excluded)
    ]
    if differences:
        model = manifest.about.get("model", "another model")
        raise UserError.one(
            str(folder),
            f"it is a checkpoint of {model}, and does not match this job ({job.name}): {first_few(differences)}",
            "train the saved model, set checkpoint.folder to another location, or exclude these tensors with "
            "checkpoint.exclude_from_loading",
        )


def first_few(problems: Sequence[str]) -> str:
    """Return the first three problems, and the number of the others, for an error message."""
    return "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")


def about_run(job: AssembledJob, world: World) -> dict[str, Any]:
    """Return the entries of :attr:`titan_ckpt.format.stored.Manifest.about` that are the same at each step."""
    return {
        "model": job.name,
        "model_name": job.model_name,
        **resolved(job),
        "decisive": decisive_keys(job.config, job.mesh.degree_keys),
        "tokenizer": token_ids(job.text_tokenizer),
        "mesh": {name: degree for name, degree in world.plan.degrees.items() if degree > 1},
        "world_size": world.size,
        "diverging_replicas": world.plan.diverging_replicas,
        "torch": torch.__version__,
        **job.identity(),
    }


def token_ids(tokenizer: TextTokenizer) -> dict[str, list[int]]:
    """Return the ids that ``tokenizer`` puts at the ``begin`` and ``end`` of a document, both empty if that is unclear, and
    at the end of the assistant's turn in a chat (``turn_end``)."""
    turn_end = [int(token) for token in tokenizer.turn_end_ids] if isinstance(tokenizer, ChatTokenizer) else []
    return {"begin": tokenizer.begin_ids, "end": tokenizer.end_ids, "turn_end": turn_end}
