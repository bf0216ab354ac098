"""The stages of a pipeline, their modules and their ranks: arithmetic on the layout, and schedules from CSV files. Imports
no torch.

A schedule file has torch's format: one row per rank, one cell per time slot, each empty or
``<stage><F|B|I|W><microbatch>``. F is forward and B backward; I and W split B into gradients of inputs and of weights.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from titan_core.api import Job, ModelLayout, Problem, UserError
from titan_core.toolkit.files import read_text
from titan_parallel.config import PipelineKeys

DEGREE = "parallelism.pipeline_parallel_degree"


@dataclass(frozen=True)
class Schedule:
    """Requirements of one of torch's schedules."""

    stages_per_rank: int | None
    """Number of stages that each rank must have; ``None``: any number."""
    order: Literal["loop", "v"] = "loop"
    """Order of successive stages over the ranks: from first to last repeatedly, or back and forth."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed separately (zero-bubble schedules)."""
    needs: Literal["any", "stages", "rounds"] = "any"
    """Number of microbatches: any, at least one per stage, or a number that divides into equal rounds over the ranks."""


SCHEDULES: Final[dict[str, Schedule]] = {
    "GPipe": Schedule(1),
    "1F1B": Schedule(1, needs="stages"),
    "LoopedBFS": Schedule(None),
    "Interleaved1F1B": Schedule(None, needs="rounds"),
    "InterleavedZeroBubble": Schedule(None, needs="rounds", splits_backward=True),
    "ZBVZeroBubble": Schedule(2, order="v", splits_backward=True),
    "DualPipeV": Schedule(2, order="v", needs="stages", splits_backward=True),
}
"""Named as in ``torch.distributed.pipelining.schedules.get_schedule_class``. Papers: GPipe arXiv 1811.06965, 1F1B arXiv
1806.03377, Interleaved arXiv 2104.04473, LoopedBFS arXiv 2211.05953, zero bubble arXiv 2401.10241, ZBV arXiv 2405.15362,
DualPipe arXiv 2412.19437."""


@dataclass(frozen=True)
class PipelinePlan:
    """The pipeline of a job."""

    microbatches: int
    """Microbatches per optimizer step."""
    stages: tuple[tuple[str, ...], ...]
    """Module names of each stage: units of the embedding, blocks, and units of the head."""
    rank_of: tuple[int, ...]
    """Rank along the mesh dimension ``pp`` that holds each stage."""

    def stages_of(self, rank: int) -> list[int]:
        """Return the numbers of the stages that ``rank`` holds, in order."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]


def unit_of(parameter: str, layout: ModelLayout) -> str:
    """Return the module of ``parameter`` that no stage divides: a unit of the embedding or head, or a block."""
    units = [*layout.embedding, *(f"{layout.blocks}.{index}" for index in range(layout.num_blocks)), *layout.head]
    return next(unit for unit in units if parameter.startswith(f"{unit}."))


def microbatches_of(job: Job) -> int:
    """Return the number of microbatches per optimizer step: all sequences of a data-parallel rank, in one run."""
    batch = job.batch
    return batch.microbatches * batch.local_size // job.section(PipelineKeys).pipeline_parallel_microbatch_size


def plan_pipeline(job: Job) -> PipelinePlan:
    """Return the plan of a job that passes :func:`titan_parallel.pipeline_check.check`."""
    ranks = job.mesh.degree("pp")
    table = schedule_table(job)
    number = number_of_stages(job, table)
    rank_of = table.rank_of if table is not None else _rank_of(number, ranks, schedule_of(job).order)
    return PipelinePlan(microbatches_of(job), cut(job, number), rank_of)


def schedule_of(job: Job) -> Schedule:
    """Return the schedule that the config names. A CSV file overrides it."""
    return SCHEDULES[job.section(PipelineKeys).pipeline_parallel_schedule]


def schedule_table(job: Job) -> ScheduleTable | None:
    """Return the schedule in the config's CSV file, or ``None`` if the config names no file.

    Raises:
        UserError: The file cannot be read, or is not a valid schedule.
    """
    path = job.section(PipelineKeys).pipeline_parallel_schedule_csv
    return read_table(path, job.config.where("parallelism.pipeline_parallel_schedule_csv", path)) if path else None


def splits_backward(job: Job) -> bool:
    """Whether the job's pipeline computes gradients of inputs and of weights separately."""
    if job.mesh.degree("pp") == 1:
        return False
    table = schedule_table(job)
    return table.splits_backward if table is not None else schedule_of(job).splits_backward


def number_of_stages(job: Job, table: ScheduleTable | None) -> int:
    """Return the number of stages that the config requests."""
    keys = job.section(PipelineKeys)
    ranks = job.mesh.degree("pp")
    if keys.pipeline_parallel_split_points:
        return len(keys.pipeline_parallel_split_points) + 1
    if table is not None:
        return len(table.rank_of)
    if keys.pipeline_parallel_layers_per_stage is not None:
        return stages_of_layers(job, keys.pipeline_parallel_layers_per_stage)
    return ranks * (schedule_of(job).stages_per_rank or 2)


def stages_of_layers(job: Job, layers: int) -> int:
    """Return the number of stages of ``layers`` blocks each, with embedding and head counted in blocks."""
    whole = job.model.layout.num_blocks + sum(_extra_layers(job))
    return max(1, -(-round(whole) // layers))


def cut(job: Job, number: int) -> tuple[tuple[str, ...], ...]:
    """Return the module names of ``number`` stages, cut at the config's split points or else as evenly as possible."""
    layout = job.model.layout
    blocks = [f"{layout.blocks}.{index}" for index in range(layout.num_blocks)]
    units = [*layout.embedding, *blocks, *layout.head]
    split_points = job.section(PipelineKeys).pipeline_parallel_split_points
    if split_points:
        edges = [0, *(units.index(name) for name in split_points), len(units)]
        return tuple(tuple(units[start:end]) for start, end in itertools.pairwise(edges))
    first, last = _extra_layers(job)
    costs = layout.block_costs or (1.0,) * layout.num_blocks
    weights = [cost * len(costs) / sum(costs) for cost in costs]  # in average blocks
    weights[0] += first
    weights[-1] += last
    stages = [blocks[start:end] for start, end in even_cuts(tuple(weights), number)]
    stages[0] = [*layout.embedding, *stages[0]]
    stages[-1] = [*stages[-1], *layout.head]
    return tuple(map(tuple, stages))


@cache  # a plan cuts the same model for many meshes
def even_cuts(weights: tuple[float, ...], number: int) -> list[tuple[int, int]]:
    """Cut ``weights`` into ``number`` successive, non-empty ranges (start, end).

    Minimises the weight of the heaviest range, then the sum of squares, by dynamic programming over the ranges' ends.
    """
    total = [0.0, *itertools.accumulate(weights)]
    count = len(weights)
    # best[end]: (heaviest range, sum of squares, starts of the ranges) of the best cut of weights[:end]
    best: list[tuple[float, float, tuple[int, ...]]] = [(total[end], total[end] ** 2, (0,)) for end in range(count + 1)]
    for ranges in range(2, number + 1):
        following = list(best)
        for end in range(ranges, count + 1):
            options = []
            for start in range(ranges - 1, end):
                heaviest, squares, starts = best[start]
                weight = total[end] - total[start]
                options.append((max(heaviest, weight), squares + weight**2, (*starts, start)))
            following[end] = min(options)
        best = following
    starts = best[count][2]
    return list(itertools.pairwise((*starts, count)))


def _extra_layers(job: Job) -> tuple[float, float]:
    """Return the work of the embedding and of the head, in blocks.

    The head counts by its floating-point operations. The embedding has none, but uses as much memory as the head, so it
    counts as half a head.
    """
    keys = job.section(PipelineKeys)
    layout = job.model.layout
    head = 6.0 * layout.dim * layout.vocab_size
    blocks = job.model.flops_per_token(job.batch.seq_len) - head
    weight = head / (blocks / layout.num_blocks) if blocks > 0 else 1.0
    first, last = keys.pipeline_parallel_first_stage_less_layers, keys.pipeline_parallel_last_stage_less_layers
    return (0.5 * weight if first is None else float(first), weight if last is None else float(last))


def _rank_of(stages: int, ranks: int, order: Literal["loop", "v"]) -> tuple[int, ...]:
    forward = list(range(ranks))
    laps = -(-stages // ranks)
    holders = [rank for lap in range(laps) for rank in (reversed(forward) if order == "v" and lap % 2 else forward)]
    return tuple(holders[:stages])


_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True)
class ScheduleTable:
    """The facts of a schedule file that the rest of the config must match."""

    ranks: int
    rank_of: tuple[int, ...]
    """Rank that holds each stage."""
    microbatches: int
    splits_backward: bool


def read_table(path: str, where: str) -> ScheduleTable:
    """Read a schedule file, and check that each stage is on one rank and runs each microbatch forward and backward.

    Raises:
        UserError: The file cannot be read, or is not a valid schedule; reports every mistake with its row.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8 text"
        raise UserError.one(where, f"cannot be read: {why}", "name a CSV file with one row per pipeline rank") from None
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    actions: dict[tuple[int, int], list[str]] = {}
    holder: dict[int, int] = {}
    problems: list[Problem] = []
    for rank, row in enumerate(rows):
        for slot, cell in enumerate(row, 1):
            if not cell:
                continue
            match = _CELL.fullmatch(cell)
            place = f"{where}: row {rank + 1}, cell {slot}"
            if match is None:
                fix = "write stage, then F, B, I or W, then microbatch, such as 0F3"
                problems.append(Problem(place, f"{cell!r} is not an action", fix))
                continue
            stage, action, microbatch = int(match[1]), match[2], int(match[3])
            if holder.setdefault(stage, rank) != rank:
                why = f"stage {stage} is already on rank {holder[stage]}"
                problems.append(Problem(place, why, "keep each stage on one rank"))
            actions.setdefault((stage, microbatch), []).append(action)
    if not problems:
        problems += [Problem(where, why, "complete the file") for why in _gaps(actions, holder)]
    if problems:
        raise UserError(*problems)
    return ScheduleTable(
        ranks=len(rows),
        rank_of=tuple(holder[stage] for stage in range(len(holder))),
        microbatches=1 + max(microbatch for _, microbatch in actions),
        splits_backward=any("I" in done for done in actions.values()),
    )


def _gaps(actions: dict[tuple[int, int], list[str]], holder: dict[int, int]) -> Iterator[str]:
    if not actions:
        yield "contains no action"
        return
    missing = sorted(set(range(max(holder) + 1)) - set(holder))
    if missing:
        yield f"has no stage {missing[0]}"
    for stage in sorted(holder):
        for microbatch in range(1 + max(microbatch for _, microbatch in actions)):
            done = "".join(actions.get((stage, microbatch), []))
            if done not in ("FB", "FIW"):
                yield (
                    f"stage {stage} runs {done or 'nothing'} for microbatch {microbatch}, "
                    "and must run F and then B, or F, I and W"
                )
