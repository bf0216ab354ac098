"""Checks that context parallelism is possible, run before anything is built. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api import CAUSAL_ATTENTION, Job, JobContext, Problem
from titan_core.api.config.sections import TrainingSection
from titan_parallel.config import HEADS, ContextParallelKeys, TensorParallelKeys
from titan_parallel.hints import Option, Refusal, degrees_below, divisors, problems

DEGREE = "parallelism.context_parallel_degree"
_SEQ_LEN = "training.seq_len"


def check(context: JobContext[ContextParallelKeys]) -> Iterator[Problem]:
    """Report mixers and heads that cannot be divided, and a sequence that does not divide into a head and a tail for each
    rank."""
    yield from problems(context.job, _mixers, _heads, _positions)


def _mixers(job: Job) -> Iterator[Refusal]:
    mixers = job.model.layout.mixers
    if job.mesh.degree("cp") == 1:
        return
    without: Option = {DEGREE: 1} if job.mesh.degree(HEADS.name) == 1 else {DEGREE: 1, HEADS.degree_key: 1}
    if not mixers:
        yield Refusal("model.name", "its layout names no mixers", [without], "name them")
    unknown = {
        mixer.kind: (pattern, mixer)
        for pattern, mixer in reversed(list(mixers.items()))
        if mixer.kind != CAUSAL_ATTENTION and mixer.divided is None
    }
    degree, heads = job.mesh.degree("cp"), job.mesh.degree(HEADS.name)
    for kind, (pattern, mixer) in unknown.items():
        if mixer.heads_dim is not None and heads == degree:
            continue
        why = f"its mixers {pattern!r} have kind {kind!r}, and context parallelism divides only {CAUSAL_ATTENTION!r} "
        why += "and kinds with a rule of their own in the model's layout (Mixer.divided)"
        by_heads: list[Option] = [{HEADS.degree_key: degree}] if mixer.heads_dim is not None else []
        yield Refusal("model.name", why, [*by_heads, without], "give these mixers a rule")


def _heads(job: Job) -> Iterator[Refusal]:
    degree, tensor = job.mesh.degree(HEADS.name), job.mesh.degree("tp")
    for mixer, pattern in {mixer: pattern for pattern, mixer in reversed(list(job.model.layout.mixers.items()))}.items():
        divides = mixer.kind == CAUSAL_ATTENTION or mixer.heads_dim is not None
        if degree == 1 or not divides or mixer.heads is None or mixer.heads % (tensor * degree) == 0:
            continue
        of_tensor = (
            f", of which tensor-parallel degree {tensor} leaves {mixer.heads / tensor:g} on a rank" if tensor > 1 else ""
        )
        why = f"must divide the {mixer.heads} heads of {pattern!r}{of_tensor}"
        smaller: list[Option] = [
            {HEADS.degree_key: one} for one in reversed(divisors(job.mesh.degree("cp"))) if one < degree
        ]
        yield Refusal(HEADS.degree_key, why, smaller)


def _positions(job: Job) -> Iterator[Refusal]:
    degree, tensor = job.mesh.degree("cp"), job.mesh.degree("tp")
    if job.section(TensorParallelKeys).disable_sequence_parallel:
        tensor = 1
    seq_len = job.section(TrainingSection).seq_len
    # Sequence parallelism shards a rank's head and tail together.
    multiple = 2 * degree * tensor
    if degree > 1 and seq_len % multiple:
        lower, most = seq_len // multiple * multiple, job.model.layout.max_seq_len
        lengths: list[Option] = [{_SEQ_LEN: length} for length in (lower, lower + multiple) if 0 < length <= most]
        why = f"must be a multiple of 2 x context-parallel degree {degree} x tensor-parallel degree {tensor} = {multiple}"
        yield Refusal(_SEQ_LEN, why, lengths or degrees_below(job, DEGREE), "use a smaller degree")
