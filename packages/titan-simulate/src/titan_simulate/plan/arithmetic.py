"""Rough memory and time of a job on a machine, from the model's layout and the mesh alone. Free of torch.

It ranks thousands of candidates, so that only a few need a simulation. It knows what a mesh dimension divides (layers, the
batch, the sequence, weights, experts) and no parallelism. All sizes are per rank, in bytes, and all times in seconds of a
step; the worst rank of a pipeline counts. ``rank_memory.py``, ``rank_seconds.py`` and ``rank_collectives.py`` have a
function for each term, whose docstring is its formula:

====================  ===========================================================================================
memory                state, gathered, activations, logits and loss; what the allocator loses; the CUDA context
computation           matmuls, attention, pointwise traffic; the host that issues them; the optimizer's update
waits                 collectives that nothing hides: regions, keys and values, stages, experts; the idle pipeline
data parallelism      gathers and reductions, as far as they take longer than the computation that hides them
====================  ===========================================================================================
"""

from __future__ import annotations

import math
from collections import Counter

from titan_core.api import PipelineCosts
from titan_simulate.hardware.machine import Machine
from titan_simulate.plan.model_sizes import ModelSizes
from titan_simulate.plan.rank_memory import memory_of
from titan_simulate.plan.rank_seconds import seconds_of
from titan_simulate.plan.rank_share import HeldUnits, RankShare
from titan_simulate.plan.unit_kinds import UnitKinds
from titan_simulate.plan.workload import GIB, STATE, Guess, Workload, divided


class Arithmetic:
    """Guesses the cost of jobs that train one model on one machine."""

    def __init__(self, sizes: ModelSizes, machine: Machine, imbalance: float = 1.0) -> None:
        """
        Args:
            imbalance: rows that the busiest rank's experts compute, by the mean of all ranks that divide them.
        """
        self._sizes, self._machine, self._imbalance = sizes, machine, imbalance
        self._units = UnitKinds(sizes, machine)
        self._held_before: dict[object, tuple[HeldUnits, ...]] = {}

    def guess(self, job: Workload) -> Guess:
        """Return the memory and the time of the worst rank."""
        ranks = [RankShare(self._units, job, held, self._imbalance) for held in self._ranks(job.pipeline)]
        memory = max((memory_of(rank) for rank in ranks), key=lambda one: sum(one.values()))
        seconds = max((seconds_of(rank) for rank in ranks), key=lambda one: sum(one.values()))
        return Guess(memory, seconds)

    def outlook(self, job: Workload) -> float:
        """Return about how long a step of ``job`` takes, as the mean of the ranks that divide the layers, who never wait;
        infinity if it does not fit. It stands for any pipeline, of which ``job`` has none."""
        (held,), layers = self._ranks(None), divided(job.mesh, "layers")
        rank = RankShare(self._units, job, held, self._imbalance)
        memory = memory_of(rank)
        needed = (memory[STATE] + memory["gathered"]) / layers + memory["activations"] + memory["logits and loss"]
        fits = needed + memory["context"] <= self._machine.memory_gib * GIB
        return sum(seconds_of(rank).values()) / layers if fits else math.inf

    def _ranks(self, pipeline: PipelineCosts | None) -> tuple[HeldUnits, ...]:
        """Return what the ranks of a pipeline hold, without repetition."""
        key = None if pipeline is None else (pipeline.stages, pipeline.rank_of, pipeline.alive)
        if key in self._held_before:
            return self._held_before[key]
        last = list(self._sizes.units)[-1]
        names: dict[int, list[str]] = {0: list(self._sizes.units)}
        copied: Counter[int] = Counter()
        if pipeline is not None:
            names = {}
            for stage, holder in zip(pipeline.stages, pipeline.rank_of, strict=True):
                names.setdefault(holder, []).extend(stage)
                copied[holder] += sum(size for unit, of, size in self._sizes.ties if unit in stage and of not in stage)
        most: dict[tuple[object, ...], HeldUnits] = {}
        for number, units in names.items():
            blocks = Counter(self._units.kind_of[name] for name in units if name in self._sizes.blocks)
            others = tuple(self._units.kind_of[name] for name in units if name not in self._sizes.blocks)
            alive = 1.0 if pipeline is None else pipeline.alive[number]
            held = HeldUnits(tuple(sorted(blocks.items())), others, last in units, alive, copied[number])
            same = (held.blocks, held.others, held.head, held.copied)
            if same not in most or most[same].alive < alive:
                most[same] = held
        self._held_before[key] = tuple(most.values())
        return self._held_before[key]
