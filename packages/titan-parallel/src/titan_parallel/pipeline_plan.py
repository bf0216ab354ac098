"""Which stages a pipeline has, which rank holds each, and what each consists of. Arithmetic on the layout, free of torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from titan_core.api.job_facts import JobFacts
from titan_parallel.config import PipelineKeys
from titan_parallel.pipeline_csv import ScheduleTable, read_table

DEGREE = "parallelism.pipeline_parallel_degree"


@dataclass(frozen=True)
class Schedule:
    """What there is to know of one of torch's schedules before it runs."""

    stages_a_rank: int | None
    """How many stages each rank must have; ``None``: any number."""
    order: Literal["loop", "v"] = "loop"
    """Where successive stages lie: round the ranks again and again, or there and back."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed apart (zero-bubble schedules)."""
    needs: Literal["any", "stages", "rounds"] = "any"
    """Microbatches: any number, at least one a stage, or a number that divides into equal rounds over the ranks."""


SCHEDULES: Final[dict[str, Schedule]] = {
    "GPipe": Schedule(1),
    "1F1B": Schedule(1, needs="stages"),
    "LoopedBFS": Schedule(None),
    "Interleaved1F1B": Schedule(None, needs="rounds"),
    "InterleavedZeroBubble": Schedule(None, needs="rounds", splits_backward=True),
    "ZBVZeroBubble": Schedule(2, order="v", splits_backward=True),
    "DualPipeV": Schedule(2, order="v", needs="stages", splits_backward=True),
}
"""By the names of ``torch.distributed.pipelining.schedules.get_schedule_class``. Papers: GPipe arXiv 1811.06965, 1F1B arXiv
1806.03377, Interleaved arXiv 2104.04473, LoopedBFS arXiv 2211.05953, zero bubble arXiv 2401.10241, ZBV arXiv 2405.15362,
DualPipe arXiv 2412.19437."""


@dataclass(frozen=True)
class PipelinePlan:
    """The pipeline of a job."""

    microbatches: int
    """Microbatches of one optimizer step."""
    stages: tuple[tuple[str, ...], ...]
    """Of each stage, the names of its modules: of the embedding, of blocks, of the head."""
    rank_of: tuple[int, ...]
    """Of each stage, the rank along the mesh dimension ``pp`` that holds it."""

    def stages_of(self, rank: int) -> list[int]:
        """The stages that ``rank`` holds, in order."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]


def microbatches_of(facts: JobFacts) -> int:
    """Microbatches of an optimizer step: all that a data-parallel rank sees passes through the pipeline in one go."""
    batch = facts.batch
    return batch.microbatches * batch.local_size // facts.section(PipelineKeys).pipeline_parallel_microbatch_size


def plan_pipeline(facts: JobFacts) -> PipelinePlan:
    """The plan of a job that :func:`titan_parallel.pipeline_check.check` lets through."""
    ranks = facts.mesh.degree("pp")
    table = schedule_table(facts)
    number = number_of_stages(facts, table)
    rank_of = table.rank_of if table is not None else _rank_of(number, ranks, schedule_of(facts).order)
    return PipelinePlan(microbatches_of(facts), cut(facts, number), rank_of)


def schedule_of(facts: JobFacts) -> Schedule:
    """The schedule that the config names, where it gives no CSV file."""
    return SCHEDULES[facts.section(PipelineKeys).pipeline_parallel_schedule]


def schedule_table(facts: JobFacts) -> ScheduleTable | None:
    """The schedule that the config gives as a CSV file.

    Raises:
        UserError: the file cannot be read, or is no schedule.
    """
    path = facts.section(PipelineKeys).pipeline_parallel_schedule_csv
    return read_table(path, facts.config.where("parallelism.pipeline_parallel_schedule_csv", path)) if path else None


def splits_backward(facts: JobFacts) -> bool:
    """Whether the job's pipeline computes gradients of inputs and of weights apart."""
    if facts.mesh.degree("pp") == 1:
        return False
    table = schedule_table(facts)
    return table.splits_backward if table is not None else schedule_of(facts).splits_backward


def number_of_stages(facts: JobFacts, table: ScheduleTable | None) -> int:
    """How many stages the config asks for."""
    keys = facts.section(PipelineKeys)
    ranks = facts.mesh.degree("pp")
    if keys.pipeline_parallel_split_points:
        return len(keys.pipeline_parallel_split_points) + 1
    if table is not None:
        return len(table.rank_of)
    if keys.pipeline_parallel_layers_per_stage is not None:
        layers = facts.model.layout.num_blocks + sum(_extra_layers(facts))
        return max(1, -(-round(layers) // keys.pipeline_parallel_layers_per_stage))
    return ranks * (schedule_of(facts).stages_a_rank or 2)


def cut(facts: JobFacts, number: int) -> tuple[tuple[str, ...], ...]:
    """The modules of each of ``number`` stages: at the config's split points, or where the stages come out most even."""
    layout = facts.model.layout
    blocks = [f"{layout.blocks}.{index}" for index in range(layout.num_blocks)]
    units = [*layout.embedding, *blocks, *layout.head]
    split_points = facts.section(PipelineKeys).pipeline_parallel_split_points
    if split_points:
        edges = [0, *(units.index(name) for name in split_points), len(units)]
        return tuple(tuple(units[start:end]) for start, end in itertools.pairwise(edges))
    first, last = _extra_layers(facts)
    costs = layout.block_costs or (1.0,) * layout.num_blocks
    weights = [cost * len(costs) / sum(costs) for cost in costs]  # 1 on average: a block's worth
    weights[0] += first
    weights[-1] += last
    stages = [blocks[start:end] for start, end in even_cuts(weights, number)]
    stages[0] = [*layout.embedding, *stages[0]]
    stages[-1] = [*stages[-1], *layout.head]
    return tuple(map(tuple, stages))


def even_cuts(weights: Sequence[float], number: int) -> list[tuple[int, int]]:
    """``number`` successive, non-empty ranges of ``weights`` (start, end) whose heaviest is as light as can be, and among
    those the ones of the least sum of squares. By dynamic programming over the ranges' ends."""
    total = [0.0, *itertools.accumulate(weights)]
    count = len(weights)
    # best[end]: (heaviest range, sum of squares, starts of the ranges) of the best way to divide weights[:end]
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


def _extra_layers(facts: JobFacts) -> tuple[float, float]:
    """The embedding and the head, in blocks' worth of work. The head by its floating-point operations; the embedding, which
    multiplies nothing but takes the head's memory, by half of them."""
    keys = facts.section(PipelineKeys)
    layout = facts.model.layout
    head = 6.0 * layout.dim * layout.vocab_size
    blocks = facts.model.flops_per_token(facts.batch.seq_len) - head
    weight = head / (blocks / layout.num_blocks) if blocks > 0 else 1.0
    first, last = keys.pipeline_parallel_first_stage_less_layers, keys.pipeline_parallel_last_stage_less_layers
    return (0.5 * weight if first is None else float(first), weight if last is None else float(last))


def _rank_of(stages: int, ranks: int, order: Literal["loop", "v"]) -> tuple[int, ...]:
    there = list(range(ranks))
    laps = -(-stages // ranks)
    holders = [rank for lap in range(laps) for rank in (reversed(there) if order == "v" and lap % 2 else there)]
    return tuple(holders[:stages])
