"""Checks that context parallelism is possible, run before anything is built. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api.build_context import JobContext
from titan_core.api.errors import Problem
from titan_core.api.layout_rules import CAUSAL_ATTENTION
from titan_core.api.sections import TrainingSection
from titan_parallel.config import ContextParallelKeys, TensorParallelKeys

DEGREE = "parallelism.context_parallel_degree"


def check(context: JobContext[ContextParallelKeys]) -> Iterator[Problem]:
    """Report mixers that cannot be divided, and a sequence that does not divide into a head and a tail for each rank."""
    degree = context.facts.mesh.degree("cp")
    if not context.facts.model.layout.mixers:
        yield context.config.problem("model.name", "its layout names no mixers", f"set {DEGREE} = 1")
    unknown = {
        mixer.kind: pattern
        for pattern, mixer in reversed(list(context.facts.model.layout.mixers.items()))
        if mixer.kind != CAUSAL_ATTENTION and mixer.divided is None
    }
    for kind, pattern in unknown.items():
        why = f"its mixers {pattern!r} have kind {kind!r}, and context parallelism divides only {CAUSAL_ATTENTION!r}"
        fix = f"set {DEGREE} = 1, or give these mixers a rule in the model's layout (Mixer.divided)"
        yield context.config.problem("model.name", f"{why} and kinds with a rule of their own", fix)
    tensor = 1 if context.facts.section(TensorParallelKeys).disable_sequence_parallel else context.facts.mesh.degree("tp")
    seq_len = context.facts.section(TrainingSection).seq_len
    # Sequence parallelism shards a rank's head and tail together.
    multiple = 2 * degree * tensor
    if seq_len % multiple:
        lower = seq_len // multiple * multiple
        nearest = [
            str(number) for number in (lower, lower + multiple) if 0 < number <= context.facts.model.layout.max_seq_len
        ]
        yield context.config.problem(
            "training.seq_len",
            f"must be a multiple of 2 x context-parallel degree {degree} x tensor-parallel degree {tensor} = {multiple}",
            f"set it to {' or '.join(nearest)}" if nearest else "use a smaller degree",
        )
