"""What makes context parallelism impossible, found before anything is built. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api.build_context import JobContext
from titan_core.api.errors import Problem
from titan_core.api.layout_rules import CAUSAL_ATTENTION
from titan_core.api.sections import TrainingSection
from titan_parallel.config import ContextParallelKeys, TensorParallelKeys

DEGREE = "parallelism.context_parallel_degree"


def check(context: JobContext[ContextParallelKeys]) -> Iterator[Problem]:
    """The sequence must divide into a head and a tail for each rank, and each of those by sequence parallelism's degree."""
    degree = context.facts.mesh.degree("cp")
    if not context.facts.model.layout.mixers:
        yield context.config.problem("model.name", "its layout does not say where positions mix", f"set {DEGREE} = 1")
    unknown = {
        mixer.kind: pattern
        for pattern, mixer in reversed(list(context.facts.model.layout.mixers.items()))
        if mixer.kind != CAUSAL_ATTENTION and mixer.divided is None
    }
    for kind, pattern in unknown.items():
        why = f"its mixers {pattern!r} are of kind {kind!r}; context parallelism divides {CAUSAL_ATTENTION!r}"
        fix = f"set {DEGREE} = 1, or let the model's layout say how they are divided (Mixer.divided)"
        yield context.config.problem("model.name", f"{why}, and kinds that bring a rule of their own", fix)
    tensor = 1 if context.facts.section(TensorParallelKeys).disable_sequence_parallel else context.facts.mesh.degree("tp")
    seq_len = context.facts.section(TrainingSection).seq_len
    # Each rank has a head and a tail; together they divide by tensor parallelism's degree.
    multiple = 2 * degree * tensor
    if seq_len % multiple:
        lower = seq_len // multiple * multiple
        nearest = [
            str(number) for number in (lower, lower + multiple) if 0 < number <= context.facts.model.layout.max_seq_len
        ]
        yield context.config.problem(
            "training.seq_len",
            f"it must be a multiple of 2 x context-parallel degree {degree} x tensor-parallel degree {tensor} = {multiple}",
            f"{' or '.join(nearest) or 'a smaller degree'} would work",
        )
