"""The model of ``torch.compile``: which operators become one kernel, and what is then never written. Free of torch.

Inductor fuses neighbouring pointwise operators, norms and reductions into kernels that read each input once and write only
what others need; it does not fuse across matmuls, attention and communication, which stay library calls. So a run of
compiled pointwise operators between two of those counts as one piece of work: it reads each storage from outside once,
and writes those of its results that something outside of it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from titan_simulate.estimate.work import Data, Kind, Work

_REDUCTIONS = ("sum", "mean", "amax", "max", "norm", "softmax", "var", "logsumexp")


def fuse(trace: Sequence[Work]) -> list[Work]:
    """Return ``trace`` with the pointwise operators of compiled code fused."""
    last_use: dict[int, int] = {}
    for position, work in enumerate(trace):
        for one in work.reads:
            last_use[one.storage] = position
    runs: dict[str, list[int]] = {}  # stream -> the run that is still open
    run_of: dict[int, list[int]] = {}
    for position, work in enumerate(trace):
        for earlier in work.after:  # what another stream waits for is a kernel's end
            if run_of.get(earlier) is runs.get(trace[earlier].stream, ()):
                runs.pop(trace[earlier].stream)
        if work.kind is Kind.WAIT or not work.launches:
            continue
        fusible = work.compiled and work.kind is Kind.POINTWISE
        if not fusible:
            runs.pop(work.stream, None)
            continue
        run = runs.setdefault(work.stream, [])
        before = trace[run[-1]] if run else work
        if (before.phase, before.action, before.unit) != (work.phase, work.action, work.unit):
            run = runs[work.stream] = []
        run.append(position)
        run_of[position] = run
    fused: list[Work] = []
    moved: dict[int, int] = {}
    for position, work in enumerate(trace):
        found = run_of.get(position)
        if found is None or found[-1] == position:
            new = work if found is None or len(found) == 1 else _fused([trace[one] for one in found], found, last_use)
            moved |= dict.fromkeys(found or (position,), len(fused))
            fused.append(new)
    return [
        replace(work, after=tuple(sorted({moved[one] for one in work.after if one in moved}))) if work.after else work
        for work in fused
    ]


def _fused(run: Sequence[Work], positions: Sequence[int], last_use: dict[int, int]) -> Work:
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for work in run:
        for one in work.reads:
            if one.storage not in writes:
                reads[one.storage] = max(one.bytes, reads.get(one.storage, 0))
        for one in work.writes:
            writes[one.storage] = max(one.bytes, writes.get(one.storage, 0))
    needed = {storage: size for storage, size in writes.items() if last_use.get(storage, -1) > positions[-1]}
    if not needed:  # a result that nothing in the step reads, such as a gradient of a parameter
        needed = {one.storage: one.bytes for one in run[-1].writes}
    reductions = sum(any(word in work.name for word in _REDUCTIONS) for work in run)
    return replace(
        run[-1],
        name="fused",
        reads=tuple(Data(*item) for item in reads.items()),
        writes=tuple(Data(*item) for item in needed.items()),
        launches=1 + reductions,
        after=tuple(position for work in run for position in work.after),
    )
