"""Checks of the options of float8 and MXFP8, run before anything is built. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titan_core.api import Experts, JobContext, Problem, Replicate, Rule
from titan_float8.config import AUTO_FILTER, Float8Section, MXSection

GATHER = "float8.enable_fsdp_float8_all_gather"
EXPERTS = "float8.convert_experts"
MX_EXPERTS = "mx.convert_experts"


def gathers_float8(context: JobContext[Float8Section]) -> bool:
    """Whether weights are gathered in float8: requested, and sharded over more than one rank."""
    requested = context.section.enable_fsdp_float8_all_gather
    return requested and context.job.mesh.degree("dp_shard") * context.job.mesh.degree("cp") > 1


def check(context: JobContext[Float8Section]) -> Iterator[Problem]:
    """Report options of float8 that contradict each other."""
    section, config = context.section, context.config
    if section.enable_fsdp_float8_all_gather and section.recipe_name != "tensorwise":
        why = f'needs one scale per weight, and recipe_name is "{section.recipe_name}"'
        yield config.problem(GATHER, why, 'set it to false, or set float8.recipe_name = "tensorwise"')
    if section.precompute_float8_dynamic_scale_for_fsdp and not section.enable_fsdp_float8_all_gather:
        key = "float8.precompute_float8_dynamic_scale_for_fsdp"
        yield config.problem(key, "has an effect only if weights are gathered in float8", f"set {GATHER} = true")
    if section.convert_experts:
        yield from _check_experts(context)
    if context.job.section(MXSection).enable:
        yield config.problem(
            "mx.enable", "float8.enable is also true, and a layer has only one format", "disable one of them"
        )


def _check_experts(context: JobContext[Float8Section]) -> Iterator[Problem]:
    """Report why the products of experts cannot be computed in float8."""
    config, job = context.config, context.job
    if context.section.recipe_name != "rowwise_with_gw_hp":
        how = "products of experts have one scale per row, and weight gradients in high precision"
        why = f'{how}, and recipe_name is "{context.section.recipe_name}"'
        yield config.problem(EXPERTS, why, 'set it to false, or set float8.recipe_name = "rowwise_with_gw_hp"')
    yield from _require_experts(context, EXPERTS)
    inside = [pattern for pattern, rule in _experts(context).items() if rule.within != Replicate()]
    if inside and job.mesh.degree("tp") > 1:
        why = f"tensor parallelism divides each expert (the rule for {inside[0]!r}), and a rank would scale parts of rows"
        yield config.problem(EXPERTS, why, "set it to false, or parallelism.tensor_parallel_degree = 1")


def check_mx(context: JobContext[MXSection]) -> Iterator[Problem]:
    """Report a filter that exists only for float8, and why the products of experts cannot be computed in MXFP8."""
    section, config = context.section, context.config
    if AUTO_FILTER in section.filter_fqns:
        yield config.problem("mx.filter_fqns", f"{AUTO_FILTER} exists only for float8", "name the layers to skip")
    ranks = context.job.mesh.degree("cp")
    if section.recipe_name == "nvfp4" and ranks > 1 and (length := context.job.batch.seq_len) % (32 * ranks):
        why = f"in weight gradients, 16 positions share a scale, and ranks hold chunks of {length / 2 / ranks:g}"
        fix = f'make training.seq_len ({length}) a multiple of {32 * ranks}, or use "nvfp4_wgrad_with_hp"'
        yield config.problem("mx.recipe_name", why, fix)
    if not section.convert_experts:
        return
    if section.recipe_name != "mxfp8_rceil_wgrad_with_hp":
        why = (
            f'recipe_name is "{section.recipe_name}", and in weight gradients of experts rows would share a scale: rows '
            "of different tokens, so that results would depend on the mesh"
        )
        yield config.problem(MX_EXPERTS, why, 'set it to false, or set mx.recipe_name = "mxfp8_rceil_wgrad_with_hp"')
    yield from _require_experts(context, MX_EXPERTS)


def _require_experts(context: JobContext[Any], key: str) -> Iterator[Problem]:
    if not _experts(context):
        why = f"model {context.job.model_name!r} has no experts: no rule of its layout is Experts"
        yield context.config.problem(key, why, "set it to false")


def _experts(context: JobContext[Any]) -> dict[str, Experts]:
    rules: dict[str, Rule] = dict(context.job.model.layout.rules)
    return {pattern: rule for pattern, rule in rules.items() if isinstance(rule, Experts)}
