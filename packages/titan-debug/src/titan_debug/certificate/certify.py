"""Makes certificates: the config, code and data of a job, and how far meshes are from one device. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final

import importlib_metadata

from titan_core.api import ALL_KEYS, Checkpoint, CommandContext, Observer, Registry, UserError
from titan_core.api.config.secrets import redact, redact_text
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.files import read_bytes
from titan_debug.certificate.contents import Certificate, OnMesh, Recorded, differences, unequal
from titan_debug.verify.curves import Curve, Verdict

_BESIDE: Final = frozenset({"job", "plugins", "validation", "metrics", "comm"})
"""Sections that change no number of a step; those of observers and checkpoints are others."""
_ELSEWHERE: Final = frozenset(
    {"model.name", "model.flavor", "model.args", "model.from_pretrained", "model.tokenizer", "model.tokenizer_path"}
    | {"training.local_batch_size", "training.global_batch_size", "training.stop_at_step", "training.dataset_path"}
    | {"training.on_nan"}
)
"""Keys whose effects are compared: the model's arguments, the size of the global batch, data and weights."""


def certify(
    context: CommandContext,
    reference: AssembledJob,
    curve: Curve,
    jobs: Sequence[AssembledJob],
    verdicts: Sequence[Verdict],
    recorded: Sequence[Recorded],
) -> Certificate:
    """Return the certificate of meshes that equal one device.

    Args:
        curve: of one device.
        jobs, recorded: of all runs, that of one device first.
        verdicts: of the others.

    Raises:
        UserError: a mesh has other initial weights, or the data cannot be read.
    """
    one, meshes = recorded[0], {}
    for job, verdict, other in zip(jobs[1:], verdicts, recorded[1:], strict=True):
        if name := unequal(one.before, other.before):
            why = f"the initial values of {name} differ from those on one device"
            raise UserError.one(f"on {job.mesh}", why, "compute initial values from the element's index alone (`Computed`)")
        weights, weight = max(differences(one.before, one.after, other.after))
        meshes[str(job.mesh)] = OnMesh(
            losses=verdict.loss_difference,
            gradients=verdict.gradient_difference,
            gradient=verdict.gradient,
            weights=weights,
            weight=weight,
            tolerance=verdict.tolerance,
        )
    return Certificate(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        recipe=redact_text(reference.config.source),
        steps=max(curve.losses),
        global_batch_size=reference.batch.global_size,
        losses=dict(curve.losses),
        meshes=meshes,
        config=config_of(reference),
        code=code_of(reference.registry),
        data=data_of(context, reference, max(curve.losses)),
        weights=one,
    )


def config_of(job: AssembledJob) -> dict[str, Any]:
    """Return the keys that affect what ``job`` trains and how it computes it, except the mesh, if they differ from their
    defaults; and the model's arguments."""
    components = (*job.registry.all(Observer), *job.registry.all(Checkpoint))
    observing = {one.config for one in components if one.config is not None and one.config.may_change == ALL_KEYS}
    values = redact(job.config.as_dict())
    arguments = job.model_args.model_dump(mode="json")
    found: dict[str, Any] = {"model.name": job.family.name, **{f"model.args.{key}": arguments[key] for key in arguments}}
    for cls in job.config.sections:
        defaults = cls.model_construct().model_dump(mode="json", exclude_none=True)
        for name, value in values.get(cls.section, {}).items():
            key = f"{cls.section}.{name}"
            beside = cls in observing or cls.section in _BESIDE or name not in cls.model_fields
            if not beside and key not in _ELSEWHERE | job.mesh.degree_keys and value != defaults.get(name):
                found[key] = value
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def code_of(registry: Registry) -> dict[str, str]:
    """Return the version of each plugin's distribution, and of the libraries of Titan that it requires, with a digest of
    their modules; and the versions of Python and torch."""
    packages = {
        plugin["distribution"]: (plugin["version"], module.__name__.partition(".")[0])
        for plugin, (module, _) in zip(registry.versions(), registry.modules(), strict=True)
    }
    for library in {name for one in [*packages] for name in _requirements(one)} - {*packages}:
        if "titan-core" in _requirements(library):
            packages[library] = importlib_metadata.version(library), library.replace("-", "_")
    found = {name: " ".join([version, *digest_of_code(module)]) for name, (version, module) in sorted(packages.items())}
    return {**found, "torch": importlib_metadata.version("torch"), "Python": platform.python_version()}


def _requirements(distribution: str) -> Iterator[str]:
    """Yield the names of the installed distributions that ``distribution`` requires."""
    try:
        required = importlib_metadata.requires(distribution) or ()
    except importlib_metadata.PackageNotFoundError:  # a plugin from a file, or an optional requirement
        return
    for text in required:
        if found := re.match(r"[\w.-]+", text):
            yield found[0]


def digest_of_code(module: str) -> Iterator[str]:
    """Yield the start of a SHA-256 of the files of Python code in a package; nothing for a plugin from a file, whose version
    is its hash."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return
    digest = hashlib.sha256()
    for folder in map(Path, spec.submodule_search_locations):
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder).as_posix()}\n".encode() + hashlib.sha256(read_bytes(file)).digest())
    yield digest.hexdigest()[:16]


def data_of(context: CommandContext, job: AssembledJob, steps: int) -> str:
    """Return a digest of the tokens, their weights and the documents of the global batches of the first ``steps`` steps.

    Raises:
        UserError: a dataset cannot be opened or read.
    """
    digest = hashlib.sha256()
    for rows in islice(context.read_data(job), steps):
        digest.update(json.dumps([list(rows.tokens.shape), rows.lengths, sorted(rows.extras)]).encode())
        weights = () if rows.weights is None else (rows.weights.astype("<f4"),)
        for values in (rows.tokens.astype("<u4"), *weights, *(rows.extras[name] for name in sorted(rows.extras))):
            digest.update(values.tobytes())
    return digest.hexdigest()
