"""``titan model show``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from titan_core.api import Config, Mixer, ModelLayout, Recipe, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import ModelSection
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_core.cli.invocation import Invocation
from titan_core.config.load import RawConfig, resolve
from titan_core.job.assemble import assemble, define_model, pick_model
from titan_core.toolkit.arguments import json_argument
from titan_core.toolkit.text import describe_model, print_json, print_table

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
        "rules": {pattern: str(rule) for pattern, rule in layout.rules.items()},
        "initial_values": {pattern: str(value) for pattern, value in layout.parameters.items()},
        "buffers": list(layout.buffers),
        "tied": dict(layout.tied),
        "meshes": dict(_meshes(context, config)),
    }
    if context.arguments.json:
        print_json(facts)
    else:
        print_table(("", f"model of {config.source}"), list(_rows(facts, layout)))
        print("Before step 1, `titan train` also tries the division on a small copy of the model.")
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
    shown = [f"{key} {value}" for key, value in given.items() if key == "heads" or value != getattr(usual, key)]
    return ", ".join([mixer.kind.replace("_", " "), *shown])


def _meshes(context: Invocation, config: Config) -> Iterator[tuple[str, str]]:
    """Yield each mesh dimension's degree key, and the degrees of :data:`DEGREES` that the model allows, or why none."""
    for dim in STANDARD_DIMS:
        allowed: list[str] = []
        reason = ""
        for degree in DEGREES:
            # As many sequences of as many positions as any division needs.
            sizes = {"training.local_batch_size": 16, "training.global_batch_size": -1, dim.degree_key: degree}
            try:
                more = [Override(key, str(value)) for key, value in {**_undivided(), **sizes}.items()]
                found = _overridden(context, config, more)
                assemble(found, context.registry, degree, missing_ok=True)
            except UserError as error:
                reason = reason or "; ".join(problem.why for problem in error.problems)
            else:
                allowed.append(str(degree))
        yield dim.degree_key, ", ".join(allowed) or f"none: {reason}"


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
