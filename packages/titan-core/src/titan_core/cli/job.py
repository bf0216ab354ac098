"""``titan job show`` and ``titan config show|check``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from titan_core.api import CommandContext
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.render import to_toml
from titan_core.job.stages import job_of_stage
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.toolkit.arguments import json_argument, recipe_arguments, world_size_argument
from titan_core.toolkit.text import describe_model, print_json, print_notes, print_table, say


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan job show`` and ``titan config check``."""
    recipe_arguments(parser)
    world_size_argument(parser)
    json_argument(parser)


def show_config(context: CommandContext) -> int:
    """Print the resolved config as TOML."""
    print(to_toml(context.config()), end="")
    return 0


def check(context: CommandContext) -> int:
    """Assemble the job and print that it is valid, with a note for each file that this machine lacks.

    Raises:
        UserError: the job is invalid.
    """
    arguments = context.arguments
    job = context.job(arguments.world_size, missing_ok=True)
    source, mesh = job.config.source, job.mesh
    if arguments.json:
        facts = {"source": source, "world_size": mesh.world_size, "mesh": mesh.degrees, "notes": job.notes}
        print_json({"valid": True, **facts})
    else:
        say(f"{source}: valid for {mesh.world_size} process(es): {mesh}")
        print_notes(job.notes)
    return 0


def show(context: CommandContext) -> int:
    """Print the assembled job: components, mesh, batch, the order of transforms, and files that this machine lacks."""
    arguments = context.arguments
    job = context.job(arguments.world_size, missing_ok=True)
    lifecycle = Lifecycle()
    for module, origin in job.registry.modules():
        lifecycle.register(module, origin=origin)
    more = lifecycle.job_facts(job)
    facts = {**describe(job), "facts": {fact.name: fact.value for fact in more}}
    if arguments.json:
        print_json(facts)
        return 0
    model, batch = facts["model"], facts["batch"]
    described = describe_model(model["name"], model["parameters"], model["active_parameters"])
    mesh = " x ".join(f"{name}={degree}" for name, degree in facts["mesh"].items())
    rows = [
        ("model", f"{described}, exactly {model['parameters']:,}; "
                  f"{model['flops_per_token']:.4g} FLOPs per token"),
        ("mesh", f"{facts['world_size']} process(es): {mesh}"),
        ("batch", f"{batch['global_size']} sequences of {batch['seq_len']} tokens = {batch['ranks']} ranks x "
                  f"{batch['microbatches']} microbatches x {batch['local_size']}; {batch['logical_shards']} logical shards"),
        *((name, value) for name, value in facts["components"].items()),
        *((f"transform {number}", f"{transform['phase']}: {transform['name']} ({transform['distribution']})")
          for number, transform in enumerate(facts["transforms"], 1)),
        *((fact.name, fact.text) for fact in more),
        *((f"stage {stage['name']!r}", stage_text(stage)) for stage in facts["stages"]),
    ]  # fmt: skip
    print_table(("", f"job of {job.config.source}"), rows)
    print_notes(job.notes)
    return 0


def describe(job: AssembledJob) -> dict[str, Any]:
    """Return the assembled job for JSON output."""
    batch = job.batch
    components = {component.kind: component.name for component in (job.tokenizer, job.optimizer, job.lr_schedule)}
    components["dataset"] = ", ".join(dataset.name for dataset in job.data.datasets)
    if job.validation is not None:
        components["validation"] = ", ".join(dataset.name for dataset in job.validation.datasets)
    components["checkpoint"] = job.checkpoint.name if job.checkpoint is not None else "none"
    components["observers"] = ", ".join(observer.name for observer in job.observers)
    return {
        "source": job.config.source,
        "digest": job.digest(),
        "world_size": job.mesh.world_size,
        "mesh": dict(job.mesh.degrees),
        "model": {
            "name": job.name,
            "parameters": job.model.num_params,
            "active_parameters": job.model.num_active_params,
            "flops_per_token": job.flops_per_token,
        },
        "batch": asdict(batch),
        "components": components,
        "transforms": [
            {
                "phase": transform.phase.name,
                "name": transform.name,
                "distribution": job.registry.distribution(transform),
            }
            for transform in job.transforms
        ],
        "stages": [describe_stage(job, number) for number in range(len(job.stages))],
        "dump_folder": job.dump_folder,
        "notes": job.notes,
    }


def describe_stage(job: AssembledJob, number: int) -> dict[str, Any]:
    """Return a stage of ``job`` for JSON output."""
    stage = job_of_stage(job, number, missing_ok=True)
    return {
        "name": job.stages[number].name,
        "first_step": stage.first_step,
        "end_step": stage.end_step,
        "tokens": job.tokens_before(stage.end_step) - job.tokens_before(stage.first_step),
        "mesh": {name: degree for name, degree in stage.mesh.degrees.items() if degree > 1},
        "batch": asdict(stage.batch),
        "datasets": [dataset.name for dataset in stage.data.datasets],
    }


def stage_text(stage: dict[str, Any]) -> str:
    """Return the description of a stage in one line."""
    batch, mesh = stage["batch"], " x ".join(f"{name}={degree}" for name, degree in stage["mesh"].items())
    if stage["end_step"] <= stage["first_step"]:
        return "never begins"
    steps = f"steps {stage['first_step'] + 1:,} to {stage['end_step']:,}, {stage['tokens']:,} tokens"
    sizes = f"{batch['global_size']} sequences of {batch['seq_len']}, local batch {batch['local_size']}"
    return f"{steps}: {sizes}; {', '.join(stage['datasets'])}{'; ' * bool(mesh)}{mesh}"
