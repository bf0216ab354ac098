"""Checks that tensor parallelism is possible, run before anything is built. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from titan_core.api import Job, JobContext, Problem
from titan_core.toolkit.sections import TrainingSection
from titan_parallel.config import CompileSection, TensorParallelKeys
from titan_parallel.hints import Option, Refusal, degrees_below, divisors, problems

DEGREE = "parallelism.tensor_parallel_degree"
_SEQ_LEN = "training.seq_len"


def check(context: JobContext[TensorParallelKeys]) -> Iterator[Problem]:
    """Report heads and positions that the degree does not divide."""
    yield from problems(context.job, _regions, _heads, _positions, _compiled)


def _regions(job: Job) -> Iterator[Refusal]:
    if not job.model.layout.regions and job.mesh.degree("tp") > 1:
        yield Refusal("model.name", "its layout has no regions for tensor parallelism to shard", [{DEGREE: 1}])


def _heads(job: Job) -> Iterator[Refusal]:
    degree, layout = job.mesh.degree("tp"), job.model.layout
    for mixer, pattern in {mixer: pattern for pattern, mixer in reversed(list(layout.mixers.items()))}.items():
        if mixer.heads is None or mixer.key_heads is None:
            continue
        heads = math.gcd(mixer.heads, mixer.key_heads)
        if heads % degree:
            why = f"must divide the {mixer.heads} heads and {mixer.key_heads} key/value heads of {pattern!r}"
            yield Refusal(DEGREE, why, degrees_below(job, DEGREE), f"the degrees {divisors(heads)} do")


def _positions(job: Job) -> Iterator[Refusal]:
    degree, seq_len = job.mesh.degree("tp"), job.section(TrainingSection).seq_len
    whole_sequences = job.section(TensorParallelKeys).disable_sequence_parallel
    # The check of context parallelism is stricter, so it reports instead of this one.
    if job.trains and not whole_sequences and job.mesh.degree("cp") == 1 and seq_len % degree:
        lower, most = seq_len // degree * degree, job.model.layout.max_seq_len
        lengths: list[Option] = [{_SEQ_LEN: length} for length in (lower, lower + degree) if 0 < length <= most]
        why = f"must be a multiple of tensor_parallel_degree ({degree}), because sequence parallelism shards it"
        yield Refusal(_SEQ_LEN, why, [*lengths, {"parallelism.disable_sequence_parallel": True}])


def _compiled(job: Job) -> Iterator[Refusal]:
    section = job.section(CompileSection)
    if job.section(TensorParallelKeys).enable_async_tensor_parallel and not (
        section.enable and "model" in section.components
    ):
        wanted = {"compile.enable": True, "compile.components": [*dict.fromkeys(("model", *section.components))]}
        changes = {key: value for key, value in wanted.items() if job.config.value(key) != value}
        yield Refusal("parallelism.enable_async_tensor_parallel", "needs the model compiled", [changes])
