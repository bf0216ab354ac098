"""Checks that tensor parallelism is possible, run before anything is built. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from titan_core.api.build_context import JobContext
from titan_core.api.errors import Problem
from titan_core.api.sections import TrainingSection
from titan_parallel.config import CompileSection, TensorParallelKeys
from titan_parallel.numbers import divisors

DEGREE = "parallelism.tensor_parallel_degree"


def check(context: JobContext[TensorParallelKeys]) -> Iterator[Problem]:
    """Report heads and positions that the degree does not divide."""
    degree = context.facts.mesh.degree("tp")
    layout = context.facts.model.layout
    keys = context.section
    if not layout.regions:
        yield context.config.problem(
            "model.name", "its layout has no regions for tensor parallelism to shard", f"set {DEGREE} = 1"
        )
    for mixer, pattern in {mixer: pattern for pattern, mixer in reversed(list(layout.mixers.items()))}.items():
        if mixer.heads is None or mixer.key_heads is None:
            continue
        heads = math.gcd(mixer.heads, mixer.key_heads)
        if heads % degree:
            why = f"must divide the {mixer.heads} heads and {mixer.key_heads} key/value heads of {pattern!r}"
            yield context.config.problem(DEGREE, why, f"set it to one of {divisors(heads)}")
    seq_len = context.facts.section(TrainingSection).seq_len
    # The check of context parallelism is stricter, so it reports instead of this one.
    if (
        context.facts.trains
        and not keys.disable_sequence_parallel
        and context.facts.mesh.degree("cp") == 1
        and seq_len % degree
    ):
        yield context.config.problem(
            "training.seq_len",
            f"must be a multiple of tensor_parallel_degree ({degree}), because sequence parallelism shards it",
            f"set it to {seq_len // degree * degree}, or set parallelism.disable_sequence_parallel = true",
        )
    compile_ = context.facts.section(CompileSection)
    if keys.enable_async_tensor_parallel and not (compile_.enable and "model" in compile_.components):
        yield context.config.problem(
            "parallelism.enable_async_tensor_parallel", "needs the model compiled", "set compile.enable = true"
        )
