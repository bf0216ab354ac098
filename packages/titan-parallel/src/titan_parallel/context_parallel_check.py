"""Checks that context parallelism is possible, run before anything is built. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api.build_context import JobContext
from titan_core.api.errors import Problem
from titan_core.api.job_facts import JobFacts
from titan_core.api.layout_rules import CAUSAL_ATTENTION
from titan_core.api.sections import TrainingSection
from titan_parallel.config import ContextParallelKeys, TensorParallelKeys
from titan_parallel.hints import Option, Refusal, degrees_below, problems

DEGREE = "parallelism.context_parallel_degree"
_SEQ_LEN = "training.seq_len"


def check(context: JobContext[ContextParallelKeys]) -> Iterator[Problem]:
    """Report mixers that cannot be divided, and a sequence that does not divide into a head and a tail for each rank."""
    yield from problems(context.facts, _mixers, _positions)


def _mixers(facts: JobFacts) -> Iterator[Refusal]:
    mixers = facts.model.layout.mixers
    if facts.mesh.degree("cp") == 1:
        return
    if not mixers:
        yield Refusal("model.name", "its layout names no mixers", [{DEGREE: 1}], "name them")
    unknown = {
        mixer.kind: pattern
        for pattern, mixer in reversed(list(mixers.items()))
        if mixer.kind != CAUSAL_ATTENTION and mixer.divided is None
    }
    for kind, pattern in unknown.items():
        why = f"its mixers {pattern!r} have kind {kind!r}, and context parallelism divides only {CAUSAL_ATTENTION!r} "
        why += "and kinds with a rule of their own in the model's layout (Mixer.divided)"
        yield Refusal("model.name", why, [{DEGREE: 1}], "give these mixers a rule")


def _positions(facts: JobFacts) -> Iterator[Refusal]:
    degree, tensor = facts.mesh.degree("cp"), facts.mesh.degree("tp")
    if facts.section(TensorParallelKeys).disable_sequence_parallel:
        tensor = 1
    seq_len = facts.section(TrainingSection).seq_len
    # Sequence parallelism shards a rank's head and tail together.
    multiple = 2 * degree * tensor
    if degree > 1 and seq_len % multiple:
        lower, most = seq_len // multiple * multiple, facts.model.layout.max_seq_len
        lengths: list[Option] = [{_SEQ_LEN: length} for length in (lower, lower + multiple) if 0 < length <= most]
        why = f"must be a multiple of 2 x context-parallel degree {degree} x tensor-parallel degree {tensor} = {multiple}"
        yield Refusal(_SEQ_LEN, why, lengths or degrees_below(facts, DEGREE), "use a smaller degree")
