"""Checks that tensor parallelism is possible, run before anything is built. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import accumulate

from titan_core.api import Column, Experts, Job, JobContext, Mixer, ModelLayout, Problem, Row, Rule, Shard, matches
from titan_core.api.config.sections import TrainingSection
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
        why = undivided_heads(mixer, degree)
        if why is not None and not _is_whole(pattern, layout):
            heads = math.gcd(mixer.heads or 1, mixer.key_heads or 1)
            yield Refusal(DEGREE, f"{why} of {pattern!r}", degrees_below(job, DEGREE), f"the degrees {divisors(heads)} do")


def divides(rule: Rule | None) -> bool:
    """Whether tensor parallelism shards a parameter with this rule."""
    if isinstance(rule, Experts):
        return divides(rule.within)
    return isinstance(rule, Column | Row | Shard)


def _is_whole(mixer: str, layout: ModelLayout) -> bool:
    """Whether mixers with the pattern ``mixer`` seem to be in regions without a sharded parameter, of which every rank
    computes all heads. Names of parameters are known, and checked, only when the model is built: here, the first wildcard
    in a block's pattern stands for its number."""
    region = next((path for path in accumulate(mixer.split("."), "{}.{}".format) if matches(path, layout.regions)), None)
    if region is None:
        return False
    sharded = [pattern for pattern, rule in layout.rules.items() if divides(rule)]
    numbers = {pattern.removeprefix(f"{layout.blocks}.").partition(".")[0] for pattern in (region, *sharded)}
    return not any(
        _may_match(_of_block(pattern, layout, number), f"{_of_block(region, layout, number)}.*")
        for number in {"0", *filter(str.isdecimal, numbers)}
        for pattern in sharded
    )


def _of_block(pattern: str, layout: ModelLayout, number: str) -> str:
    every = f"{layout.blocks}.*."
    return pattern.replace(every, f"{layout.blocks}.{number}.", 1) if pattern.startswith(every) else pattern


def undivided_heads(mixer: Mixer, degree: int) -> str | None:
    """Return why ``degree`` ranks cannot divide the heads of ``mixer``; ``None`` if they can, or if there are none."""
    if mixer.heads is None or mixer.key_heads is None or math.gcd(mixer.heads, mixer.key_heads) % degree == 0:
        return None
    return f"must divide the {mixer.heads} heads and {mixer.key_heads} key/value heads"


@cache
def _may_match(one: str, other: str) -> bool:
    """Whether a name may match both patterns."""
    if not one or not other:
        return set(one + other) <= {"*"}
    if one[0] in "?[" or other[0] in "?[":
        return True  # not looked into
    if one[0] == "*":
        return _may_match(one[1:], other) or _may_match(one, other[1:])
    if other[0] == "*":
        return _may_match(other, one)
    return one[0] == other[0] and _may_match(one[1:], other[1:])


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
    if job.section(TensorParallelKeys).enable_async_tensor_parallel and not section.compiles_blocks:
        wanted = {"compile.enable": True, "compile.components": [*dict.fromkeys(("model", *section.components))]}
        changes = {key: value for key, value in wanted.items() if job.config.value(key) != value}
        yield Refusal("parallelism.enable_async_tensor_parallel", "needs the model compiled", [changes])
