"""What makes tensor parallelism impossible, found before anything is built. Free of torch."""

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
    """Heads and positions must divide by the degree."""
    degree = context.facts.mesh.degree("tp")
    layout = context.facts.model.layout
    keys = context.section
    if not layout.regions:
        yield context.config.problem(
            "model.name", "its layout does not say how its layers may be divided", f"set {DEGREE} = 1"
        )
    for mixer, pattern in {mixer: pattern for pattern, mixer in reversed(list(layout.mixers.items()))}.items():
        if mixer.heads is None or mixer.key_heads is None:
            continue
        heads = math.gcd(mixer.heads, mixer.key_heads)
        if heads % degree:
            why = f"the {mixer.heads} heads and {mixer.key_heads} key/value heads of {pattern!r} must divide by it"
            yield context.config.problem(DEGREE, why, f"{divisors(heads)} would work")
    seq_len = context.facts.section(TrainingSection).seq_len
    # With context parallelism, whose check is stricter, it is for that one to say.
    if not keys.disable_sequence_parallel and context.facts.mesh.degree("cp") == 1 and seq_len % degree:
        yield context.config.problem(
            "training.seq_len",
            f"sequence parallelism divides it over {degree} ranks",
            f"{seq_len // degree * degree} would work, or parallelism.disable_sequence_parallel = true",
        )
    compile_ = context.facts.section(CompileSection)
    if keys.enable_async_tensor_parallel and not (compile_.enable and "model" in compile_.components):
        yield context.config.problem(
            "parallelism.enable_async_tensor_parallel", "it is the compiler's doing", "set compile.enable = true"
        )
