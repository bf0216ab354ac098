"""The search: trace the kinds of blocks that may win, compose their jobs, estimate the best, and say why the others lost.

A kind (:mod:`titan_simulate.plan.kinds`) is not traced if no job of it can be faster than the best known one. That follows
from the kinds that it descends from: ranks that divide the work of a block take together no less time than fewer ranks do,
because tiles, launches and latencies do not divide, and collectives are added. So the time of ``n`` ranks for a sequence, by
all ranks of the job, bounds the step of every job whose blocks are those, divided further, whatever its pipeline, its data
parallelism and its microbatches do. Likewise, these ranks keep together no fewer activations: a kind is not traced either if
its share of them, with that of the state, is too large for a device in every job.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titan_core.api import Job, MeshPlan, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.hardware.machine import Machine
from titan_simulate.plan.candidates import Candidate, JobOf, Refused, Space, refusal
from titan_simulate.plan.compose import GIB, Composes, Composition
from titan_simulate.plan.kinds import GLOBAL_BATCH, LOCAL_BATCH, Kind
from titan_simulate.plan.result import (
    CLOSE,
    INTERRUPTED,
    Figures,
    Finalist,
    Loser,
    Plan,
    degrees_of,
    describe,
    reason,
    speed,
)

LARGEST_MICROBATCH = 8
"""Sequences of the microbatch for which kinds are bounded: larger ones take no less time for each sequence."""
NEARLY = 1.1
"""Candidates whose composed memory is up to this factor too large may fit; only an estimate knows."""
SIMULATION = "its simulation failed"
"""In place of the key of :class:`Refused`, for a candidate whose estimate raised another error than a UserError."""
PER_MESH = 2
"""Most finalists on one mesh, so that they differ in more than details."""


Estimator = Callable[[Sequence[Override]], Figures]
"""Overrides -> the estimate of the job. Raises UserError if the job cannot run."""


@dataclass
class _Open:
    """A kind that was not traced."""

    mesh: MeshPlan
    """A mesh that has it."""
    batch: int
    """Sequences of the largest microbatch."""
    bound: float = 0.0
    """No step of a job of this kind is shorter."""
    ancestor: Kind | None = None
    """The traced kind from which that follows."""
    least: float | None = None
    """No step of a job of this kind that fits is shorter, if that is known."""
    undivided: float = 0.0
    """The bound from blocks that are not divided."""
    divided: dict[str, float] = field(default_factory=dict)
    """Degree key -> the bound from blocks that are divided along that dimension only."""

    @property
    def expected(self) -> float:
        """What the bound will be once the kind is traced, if what division along several dimensions costs adds up."""
        if not self.undivided:
            return self.bound
        return max(self.bound, self.undivided + sum(max(0.0, one - self.undivided) for one in self.divided.values()))


class Search:
    """One search for the best candidates of a space on a machine."""

    def __init__(self, space: Space, composer: Composes, machine: Machine, job_of: JobOf) -> None:
        self._space, self._composer, self._machine, self._job_of = space, composer, machine, job_of
        self._refused: list[Refused] = []
        self._plan = Plan(0)
        self._per_mesh: dict[str, int] = defaultdict(int)  # finalists
        self._deadline: float | None = None
        self._groups: dict[tuple[object, ...], list[tuple[dict[str, int], int]]] = defaultdict(list)
        """Degrees that decide about kinds -> meshes and local batches."""
        self._open: dict[Kind, _Open] = {}
        self._candidates: dict[Kind, list[Candidate | Refused]] = {}
        self._composed: list[tuple[Candidate, Composition]] = []
        self._done: set[int] = set()  # positions of composed candidates that were estimated
        self._factors: dict[tuple[object, ...], tuple[float, float]] = {}
        """What candidates choose -> corrections of their composed time, and of their composed activations."""
        self._valid: dict[str, bool] = {}  # mesh -> whether jobs on it can be assembled
        divided = [dim for dim in space.job.mesh.dims if dim.divides in ("weights", "sequence")]
        views = [view for view in space.job.mesh.views if not view.shards_parameters]
        self._divided = {dim.degree_key for dim in divided}
        self._ignored = {view.degree_key for view in views}

    def run(
        self,
        estimate: Estimator,
        finalists: int,
        given: AssembledJob | None = None,
        deadline: float | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> Plan:
        """Return the best candidates. An interrupt ends the search with those that are known.

        Args:
            finalists: number of candidates to estimate. If none of them fits, as many again.
            given: the recipe's own job, which is always a finalist.
            deadline: seconds after which no further kind is traced, once a candidate fits.
            report: receives how far the search is, in words.
        """
        began = time.perf_counter()
        plan = self._plan = Plan(finalists)
        self._deadline = None if deadline is None else began + deadline
        try:
            self._compare(estimate, given, report)
        except KeyboardInterrupt:
            plan.stopped, plan.unproved, plan.unexpected = INTERRUPTED, 1.0, False
        plan.best.sort(key=lambda one: one.figures.step_seconds)
        plan.too_large.sort(key=lambda one: one.figures.peak_gib)
        if not plan.best and plan.stopped is None:
            plan.nearest = self._nearest()
        plan.losers = [*self._slower(), *self._explained(), *self._refusals()]
        plan.seconds = time.perf_counter() - began
        return plan

    def _compare(self, estimate: Estimator, given: AssembledJob | None, report: Callable[[str], None]) -> None:
        self._find_kinds()
        if given is not None:
            recipe = self._space.candidate(given, {}, self._space.kind_of(given), given=True)
            self._open.setdefault(recipe.kind, _Open(recipe.mesh, min(recipe.local_batch, LARGEST_MICROBATCH)))
            self._trace([recipe.kind])
            report(self._progress())
            self._estimate(recipe, estimate)
        for proves in (False, True):
            while self._plan.unproved == 0.0:
                # Estimates correct what is composed, so kinds that could not win before may win now.
                self._trace_what_may_win(proves, report)
                if not self._estimate_best(estimate, report):
                    break

    def _estimate_best(self, estimate: Estimator, report: Callable[[str], None]) -> bool:
        """Estimate the best candidates that were not. Return whether there were some."""
        found = False
        while (best := min(self._promising(), default=None)) is not None:
            number = best[2]
            faster = best[0] < self._fastest() * (1.0 - CLOSE)
            if self._plan.estimated >= self._intended() and not faster:
                break
            report(self._progress())
            candidate, _ = self._composed[number]
            self._done.add(number)
            if self._estimate(candidate, estimate):
                self._per_mesh[str(candidate.mesh)] += 1
            found = True
        return found

    def _fastest(self) -> float:
        return min((one.figures.step_seconds for one in self._plan.best), default=math.inf)

    def _late(self) -> bool:
        return bool(self._plan.best) and self._deadline is not None and time.perf_counter() > self._deadline

    def _find_kinds(self) -> None:
        """List all kinds, and the meshes and local batches on which jobs have them."""
        routers = self._space.job.model.layout.routers.values()
        kinds: dict[tuple[object, ...], Job] = {}
        for degrees in self._space.meshes(sorted({router.experts for router in routers})):
            self._plan.meshes += 1
            for local in self._space.local_batches(degrees):
                job = self._space.assumed(degrees, local)
                key = self._space.kind(job.mesh, {}).where
                self._groups[key].append((degrees, local))
                kinds.setdefault(key, job)
        for key, job in kinds.items():
            batch = max(local for _, local in self._groups[key])
            for kind in self._space.kinds(job):
                self._open[kind] = _Open(job.mesh, min(batch, LARGEST_MICROBATCH))
        self._plan.kinds = len(self._open)

    def _trace_what_may_win(self, proves: bool, report: Callable[[str], None]) -> None:
        """Trace the open kinds that may have a job that is faster than the best known one and fits, those with the least
        bound first, and compose their candidates.

        Args:
            proves: whether to go by what is proved, in place of what is expected.
        """
        plan, at_once = self._plan, max(1, len(os.sched_getaffinity(0)) // 2)
        while True:
            limit = self._best_step() * (1.0 - CLOSE)
            bounds = {kind: one.bound if proves else one.expected for kind, one in self._open.items()}
            worth = sorted(
                (kind for kind, bound in bounds.items() if bound < limit), key=lambda kind: self._order(kind, bounds)
            )
            chosen = list(itertools.islice((kind for kind in worth if self._may_win(kind, bounds[kind], limit)), at_once))
            if not chosen:
                return
            if self._late():
                plan.unproved = 1.0 - self._open[chosen[0]].bound / self._best_step()
                plan.unexpected &= proves
                return
            what = "may" if proves else "are expected to"
            report(f"{plan.traced} of {plan.kinds} kinds of blocks traced, {len(worth)} {what} win; {self._progress()}")
            self._trace(chosen)

    def _may_win(self, kind: Kind, bound: float, limit: float) -> bool:
        """Whether a job of a kind that was not traced may fit, and take less than ``limit`` seconds.

        Args:
            bound: of the kind.
        """
        one = self._open[kind]
        if one.least is None and one.ancestor is not None:
            share = one.ancestor.ranks(self._divided) / kind.ranks(self._divided)
            bounds = (
                self._composer.least(each, one.ancestor, share)
                for each in self._variants(kind)
                if isinstance(each, Candidate)
            )
            one.least = min((seconds for seconds, gib in bounds if gib <= self._machine.memory_gib), default=math.inf)
        return one.least is None or one.least * bound / one.bound < limit

    def _variants(self, kind: Kind) -> list[Candidate | Refused]:
        """Return all candidates of a kind, and combinations that a check rejects."""
        if kind not in self._candidates:
            found: list[Candidate | Refused] = []
            for degrees, local in self._groups[kind.where]:
                values = {**degrees, GLOBAL_BATCH: self._space.global_batch, LOCAL_BATCH: local}
                found += self._space.variants(self._space.assumed(degrees, local), values, lambda other: other == kind)
            self._candidates[kind] = found
        return self._candidates[kind]

    def _order(self, kind: Kind, bounds: Mapping[Kind, float]) -> tuple[float, int, int]:
        size = math.prod(degree for _, degree in kind.degrees)
        return bounds[kind], size, len([1 for _, degree in kind.degrees if degree > 1])

    def _trace(self, kinds: Sequence[Kind]) -> None:
        found = {kind: self._open.pop(kind) for kind in kinds}
        self._composer.trace({kind: one.mesh for kind, one in found.items()})
        self._plan.traced += len(kinds)
        for kind, one in found.items():
            why = self._composer.failure(kind)
            if why is not None:
                problem = refusal(why.problems[0], str(one.mesh)) if isinstance(why, UserError) else None
                self._refused.append(problem or Refused(str(one.mesh), SIMULATION, str(why)))
                continue
            self._bound_descendants(kind)
            self._compose(kind)

    def _bound_descendants(self, kind: Kind) -> None:
        ranks, along = (
            kind.ranks(self._divided),
            [key for key, degree in kind.degrees if degree > 1 and key in self._divided],
        )
        for other, one in self._open.items():
            if not other.descends_from(kind, self._divided, self._ignored):
                continue
            seconds = self._composer.seconds_of_sequence(kind, one.batch)
            bound = seconds * ranks * self._space.global_batch / self._space.gpus
            if bound > one.bound:
                one.bound, one.ancestor, one.least = bound, kind, None
            if not along:
                one.undivided = max(one.undivided, bound)
            elif len(along) == 1:
                one.divided[along[0]] = max(one.divided.get(along[0], 0.0), bound)

    def _compose(self, kind: Kind) -> None:
        """Compose all candidates of a kind."""
        for one in self._variants(kind):
            self._plan.candidates += 1
            if isinstance(one, Refused):
                self._refused.append(one)
            elif any(each not in self._machine.matmul for each in one.matmul_types):
                why = f"{self._machine.name} does not compute in it"
                self._refused.append(Refused(str(one.mesh), one.matmul_types[0], why))
            elif self._assembles(one):
                self._composed.append((one, self._composer.composition(one)))

    def _best_step(self) -> float:
        """Return the shortest known step of a candidate that fits; infinity if none is known."""
        return min((seconds for seconds, memory, _ in self._corrected() if memory <= self._machine.memory_gib), default=1e30)

    def _corrected(self) -> Iterator[tuple[float, float, int]]:
        """Yield seconds, GiB and position of all composed candidates, as estimates of the like correct them."""
        for number, (candidate, composed) in enumerate(self._composed):
            of_time, of_memory = self._factors.get(candidate.choices, (1.0, 1.0))
            memory = composed.peak_gib + composed.memory["activations"] / 2**30 * (of_memory - 1.0)
            yield composed.step_seconds * of_time, memory, number

    def _intended(self) -> int:
        return self._plan.wanted * (1 if self._plan.best else 2)

    def _promising(self) -> Iterator[tuple[float, int, int]]:
        """Yield seconds, dimensions and position of the candidates that may be estimated next."""
        for seconds, memory, number in self._corrected():
            candidate, _ = self._composed[number]
            limit = self._machine.memory_gib * (1.0 if candidate.choices in self._factors else NEARLY)
            if number not in self._done and self._per_mesh[str(candidate.mesh)] < PER_MESH and memory <= limit:
                yield seconds, len(degrees_of(candidate)), number

    def _progress(self) -> str:
        """Return how far the search is."""
        plan = self._plan
        fastest = max((one.figures.tokens_per_second_per_gpu for one in plan.best), default=None)
        text = f"{plan.candidates:,} candidates compared, {plan.estimated} of {self._intended()} estimated"
        return text if fastest is None else f"{text}; fastest so far {fastest:,.0f} tokens/s per GPU"

    def _assembles(self, candidate: Candidate) -> bool:
        """Whether a job on the mesh of ``candidate`` is valid, by its own assembly."""
        mesh = str(candidate.mesh)
        if mesh not in self._valid:
            try:
                self._job_of(candidate.overrides)
                self._valid[mesh] = True
            except UserError as error:
                self._valid[mesh] = False
                self._refused.append(refusal(error.problems[0], mesh))
        return self._valid[mesh]

    def _estimate(self, candidate: Candidate, estimate: Estimator) -> bool:
        """Estimate a finalist, and learn from it how good compositions are. Return whether the job can run."""
        plan, limit = self._plan, self._machine.memory_gib
        try:
            figures = estimate(() if candidate.given else candidate.overrides)
        except UserError as error:
            self._refused.append(refusal(error.problems[0], str(candidate.mesh)))
            return False
        except Exception as error:  # noqa: BLE001 - one that cannot be simulated is reported among the losers
            lines = str(error).strip().splitlines() or [""]
            self._refused.append(Refused(describe(candidate), SIMULATION, f"{type(error).__name__}: {lines[0]}"))
            return False
        if self._composer.failure(candidate.kind) is not None:  # the recipe's own blocks, which only an estimate knows
            composed = Composition({"activations": figures.peak_gib * GIB}, {"compute": figures.step_seconds})
        else:
            composed = self._composer.composition(candidate)
        (plan.best if figures.peak_gib <= limit else plan.too_large).append(Finalist(candidate, composed, figures))
        activations = composed.memory["activations"] / 2**30
        of_memory = (figures.peak_gib - composed.peak_gib + activations) / activations if activations > 0 else 1.0
        of_time = figures.step_seconds / composed.step_seconds
        self._factors[candidate.choices] = of_time, min(4.0, max(0.1, of_memory))
        return True

    def _nearest(self) -> tuple[Candidate, float] | None:
        if self._plan.too_large:
            smallest = self._plan.too_large[0]
            return smallest.candidate, smallest.figures.peak_gib
        found = min(self._corrected(), key=lambda one: one[1], default=None)
        if found is None or found[1] <= self._machine.memory_gib:  # what fits could not be estimated, or was refused
            return None
        return self._composed[found[2]][0], found[1]

    def _slower(self) -> Iterator[Loser]:
        for one in self._plan.too_large:
            over = one.figures.peak_gib - self._machine.memory_gib
            detail = f"needs {one.figures.peak_gib:.1f} GiB, {over:.1f} too many (estimated)"
            yield Loser("does not fit", 1, describe(one.candidate), detail)

    def _explained(self) -> Iterator[Loser]:
        """Group candidates that were not estimated by their reason."""
        limit = self._machine.memory_gib
        best = self._plan.best[0] if self._plan.best else None
        groups: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
        for one in self._corrected():
            if one[2] in self._done:
                continue
            if one[1] > limit:
                groups["does not fit"].append(one)
            elif best is not None:
                groups[reason(self._composed[one[2]][1], best.composed)].append(one)
        for why, members in sorted(groups.items(), key=lambda item: -len(item[1])):
            if why == "does not fit":
                _, peak, number = min(members, key=lambda one: one[1])
                memory = self._composed[number][1].memory
                kind = max(memory, key=lambda name: memory[name])
                detail = f"needs about {peak:.1f} GiB, {memory[kind] / 2**30:.1f} of them {kind}"
            else:
                seconds, _, number = min(members)
                assert best is not None
                detail = speed(best.figures.step_seconds / seconds)
            yield Loser(why, len(members), describe(self._composed[number][0]), detail)

    def _refusals(self) -> Iterator[Loser]:
        groups: dict[str, list[Refused]] = defaultdict(list)
        for one in self._refused:
            groups[one.key].append(one)
        for key, members in sorted(groups.items(), key=lambda item: -len(item[1])):
            yield Loser(key if key == SIMULATION else f"refused: {key}", len(members), members[0].mesh, members[0].why)
