"""``titan model show``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from titan_core.api import Config, Mixer, ModelLayout, Problem, Recipe, Ref, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import ModelSection
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.cli.invocation import Invocation
from titan_core.config.load import RawConfig, resolve
from titan_core.job.assemble import assemble, define_model, pick_model
from titan_core.toolkit.arguments import json_argument
from titan_core.toolkit.text import describe_model, print_json, print_table

if TYPE_CHECKING:
    from titan_core.api import JobMesh

DEGREES = (2, 4, 8)
"""Degrees of each mesh dimension that are tried."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan model show``."""
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="NAME",
        help="a recipe, a TOML file, a folder of weights, or the name of a downloaded model (default: the default recipe)",
    )
    json_argument(parser)


def show(context: Invocation) -> int:
    """Print the layout of a model, and the degrees of each mesh dimension that it allows.

    Raises:
        UserError: there is no such model, or its plugin refuses it.
    """
    config = _config(context)
    model, args = pick_model(config, context.registry)
    definition = define_model(model, args)
    layout = definition.layout
    facts = {
        "name": model.name,
        "arguments": args.model_dump(mode="json", exclude_unset=True),
        "parameters": definition.num_params,
        "active_parameters": definition.num_active_params,
        "blocks": layout.num_blocks,
        "width": layout.dim,
        "vocabulary": layout.vocab_size,
        "context": layout.max_seq_len,
        "units": [*layout.embedding, f"{layout.blocks}.*", *layout.head],
        "mixers": _by_mixer(layout),
        "routers": {pattern: asdict(router) for pattern, router in layout.routers.items()},
        "masks_documents": layout.masks_documents,
        "regions": list(layout.regions),
        "rules": {pattern: _named(rule) for pattern, rule in layout.rules.items()},
        "initial_values": {pattern: _named(value) for pattern, value in layout.parameters.items()},
        "buffers": list(layout.buffers),
        "tied": dict(layout.tied),
        "meshes": dict(_meshes(context, config)),
    }
    if context.arguments.json:
        print_json(facts)
    else:
        print_table(("", f"model of {config.source}"), list(_rows(facts, layout)))
        print("These divisions are tried in one process; `titan train` tries its own on its ranks, before step 1.")
    return 0


def _config(context: Invocation) -> Config:
    """Return the config of the recipe or file, or one that starts from the folder or the downloaded model."""
    name = context.arguments.recipe
    if name is None or name in context.registry.names(Recipe) or (name.endswith(".toml") and not Path(name).is_dir()):
        return context.config()
    tables = {ModelSection.section: {"from_pretrained": name, "tokenizer": "byte"}, "training": {"seq_len": 16}}
    return resolve(RawConfig(name, "model", tables), context.overrides, context.registry)


def _by_mixer(layout: ModelLayout) -> dict[str, list[str]]:
    """Return the patterns of the modules that mix positions, by what they compute."""
    found: dict[str, list[str]] = {}
    for pattern, mixer in layout.mixers.items():
        found.setdefault(_mixer(mixer), []).append(pattern)
    return found


def _mixer(mixer: Mixer) -> str:
    """Return a mixer's kind, and its fields with other values than a plain mixer of its kind has."""
    usual = Mixer(kind=mixer.kind, heads=mixer.heads)
    given = {field.name: getattr(mixer, field.name) for field in fields(mixer) if field.name not in ("kind", "sequence_dim")}
    shown = [
        f"{key} {value.target if isinstance(value, Ref) else value}"
        for key, value in given.items()
        if key == "heads" or value != getattr(usual, key)
    ]
    return ", ".join([mixer.kind.replace("_", " "), *shown])


def _named(value: Any) -> str:
    """Return a rule or an initial value as it is written in a layout; a reference as the function that it names."""
    if not is_dataclass(value):
        return repr(value)
    if isinstance(value, Ref):
        return value.target
    given = (f"{field.name}={_named(getattr(value, field.name))}" for field in fields(value))
    return f"{type(value).__name__}({', '.join(given)})"


def _meshes(context: Invocation, config: Config) -> Iterator[tuple[str, str]]:
    """Yield each mesh dimension's degree key, and the degrees of :data:`DEGREES` that the model allows, or why none. The
    smallest one is tried on a small copy of the model, in this process, by the transforms that can."""
    trial = _Trial()
    for dim in STANDARD_DIMS:
        allowed: list[str] = []
        reason = ""
        for degree in DEGREES:
            # As many sequences of as many positions as any division needs.
            sizes = {"training.local_batch_size": 16, "training.global_batch_size": -1, dim.degree_key: degree}
            try:
                more = [Override(key, str(value)) for key, value in {**_undivided(), **sizes}.items()]
                found = _overridden(context, config, more)
                job = assemble(found, context.registry, degree, missing_ok=True)
                if not allowed:
                    trial(job, dim.degree_key)
            except UserError as error:
                reason = reason or "; ".join(problem.why for problem in error.problems)
            else:
                allowed.append(str(degree))
        yield dim.degree_key, ", ".join(allowed) or f"none: {reason}"


class _Trial:
    """A small copy of the model, on which the transforms that serve a dimension try it in this process."""

    def __init__(self) -> None:
        self._made: Any = None

    def __call__(self, job: AssembledJob, degree_key: str) -> None:
        """
        Raises:
            UserError: a transform finds that the layout does not describe what the model computes.
        """
        serving = [one for one in job.transforms if degree_key in one.served]
        if not any(one.checks.model for one in serving):
            return
        import torch

        from titan_core.model.build import build_whole
        from titan_core.model.trial import CannotTry, SmallModelTrial

        device = torch.device("cpu")
        if self._made is None:
            model = build_whole(job)
            try:
                self._made = model, SmallModelTrial(model, job.model.layout, job.model_name, device)
            except CannotTry as error:
                why = f"a few tokens cannot be computed: {error}"
                raise UserError.one(f"model {job.model_name!r}", why, "fix the model plugin") from error
        with self._made[1].evaluating():
            for one in serving:
                context = one.training_context(job, cast("JobMesh", None), device)  # one process has no mesh
                if one.checks.model and (problems := one.checks.model.call_list(Problem, *self._made, context)):
                    raise UserError(*problems)


def _undivided() -> Mapping[str, Any]:
    return {dim.degree_key: 1 for dim in STANDARD_DIMS}


def _overridden(context: Invocation, config: Config, more: list[Override]) -> Config:
    tables: dict[str, dict[str, Any]] = {}
    for section in config.sections.values():
        tables.setdefault(section.section, {}).update(section.model_dump())
    return resolve(RawConfig(config.source, "model", tables), more, context.registry)


def _rows(facts: Mapping[str, Any], layout: ModelLayout) -> Iterator[tuple[str, str]]:
    """Yield the table's rows."""
    yield "model", describe_model(facts["name"], facts["parameters"], facts["active_parameters"])
    yield (
        "sizes",
        (
            f"{layout.num_blocks} blocks of width {layout.dim:,}, vocabulary {layout.vocab_size:,}, "
            f"at most {layout.max_seq_len:,} positions"
        ),
    )
    yield "parts", " > ".join(facts["units"])
    for mixer, patterns in facts["mixers"].items():
        more = f" and {len(patterns) - 1} more" if patterns[1:] else ""
        yield "mixer", f"{patterns[0]}{more}: {mixer}"
    for router, chosen in facts["routers"].items():
        yield "router", f"{router}: {chosen['per_token']} of {chosen['experts']} experts for each token"
    yield "documents", "masked, if data.document_mask is set" if layout.masks_documents else "cannot be masked"
    for region in facts["regions"]:
        yield "tensor parallel", region
    for what in ("rules", "initial_values"):
        for pattern, value in facts[what].items():
            yield what.replace("_", " ").removesuffix("s"), f"{pattern}: {value}"
    for name in facts["buffers"]:
        yield "buffer", name
    for name, source in layout.tied.items():
        yield "tied", f"{name} is {source}"
    for key, degrees in facts["meshes"].items():
        yield key.removeprefix("parallelism."), degrees
