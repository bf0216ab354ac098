"""The search: trace the kinds of blocks that may win, compose their jobs, estimate the best, and say why the others lost.

A kind (:mod:`titan_simulate.plan.kinds`) is not traced if no job of it can be faster than the best known one: because its
bound (:mod:`titan_simulate.plan.open_kinds`) is longer, or that of its jobs whose activations and state fit.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from titan_core.api import MeshPlan, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.hardware.machine import Machine
from titan_simulate.plan.assembled import Assembled
from titan_simulate.plan.candidates import Candidate, JobOf, Refused, Space, refusal
from titan_simulate.plan.compose import GIB, Composes, Composition, Worth
from titan_simulate.plan.kinds import GLOBAL_BATCH, LOCAL_BATCH, Kind
from titan_simulate.plan.losers import SIMULATION, Known, losers, nearest
from titan_simulate.plan.meshes import undivided
from titan_simulate.plan.open_kinds import Expected, OpenKind, OpenKinds, slowdown
from titan_simulate.plan.result import (
    CLOSE,
    INTERRUPTED,
    Figures,
    Finalist,
    Plan,
    degrees_of,
    describe,
)

LARGEST_MICROBATCH = 8
"""Sequences of the microbatch for which kinds are bounded: larger ones take no less time for each sequence."""
NEARLY = 1.1
"""Candidates whose composed memory, or step, is up to this factor too large may fit, or win; only an estimate knows."""
LOOK_AHEAD = 1.0
"""Seconds in which the search composes and looks for the next kind while others are traced, which take longer."""
PER_MESH = 2
"""Most finalists on one mesh, so that they differ in more than details."""
SHARE_OF_ESTIMATES = 0.25
"""Share of the time limit in which nothing is traced any more."""
Estimator = Callable[[Sequence[Override]], Figures]
"""Overrides -> the estimate of the job. Raises UserError if the job cannot run."""


class Search:
    """One search for the best candidates of a space on a machine."""

    def __init__(self, space: Space, composer: Composes, machine: Machine, job_of: JobOf) -> None:
        self._space, self._composer, self._machine = space, composer, machine
        self._assembled = Assembled(job_of)
        self._refused = self._assembled.refused
        self._plan = Plan(0)
        self._per_mesh: dict[str, int] = defaultdict(int)  # finalists
        self._groups: dict[tuple[object, ...], list[tuple[dict[str, int], int]]] = defaultdict(list)
        """Degrees that decide about kinds -> meshes and local batches."""
        self._open = OpenKinds(space.rules, composer, space.global_batch / space.gpus)
        self._roots: list[Kind] = []
        self._waiting: list[Kind] = []  # traced, and not composed
        self._candidates: dict[Kind, list[Candidate | Refused]] = {}
        self._composed: list[tuple[Candidate, Composition]] = []
        self._done: set[int] = set()  # positions of composed candidates that were estimated
        self._factors: dict[tuple[object, ...], tuple[float, float]] = {}
        """What candidates choose -> corrections of their composed time, and of their composed activations."""
        self._rejected: dict[object, list[Expected]] = defaultdict(list)
        """Choices -> kinds that were not expected to win, by a look at their jobs."""
        self._longest = 0.0  # seconds of an estimate
        self._limit = 0.0
        self._deadline: float | None = None

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
            deadline: seconds after which nothing more is traced or estimated, once a candidate fits.
            report: receives how far the search is, in words.
        """
        began = time.perf_counter()
        plan = self._plan = Plan(finalists)
        self._limit, self._deadline = deadline or 0.0, None if deadline is None else began + deadline
        try:
            self._compare(estimate, given, report)
            self._count_open()
        except KeyboardInterrupt:
            plan.stopped, plan.unproved, plan.unexpected = INTERRUPTED, 1.0, False
        plan.best.sort(key=lambda one: one.figures.step_seconds)
        plan.too_large.sort(key=lambda one: one.figures.peak_gib)
        limit, found = self._machine.memory_gib, self._corrected()
        composed = [Known(*self._composed[number], seconds, gib, number in self._done) for seconds, gib, number in found]
        if not plan.best and plan.stopped is None:
            plan.nearest = nearest(plan, composed, limit)
        plan.losers = losers(plan, composed, self._refused, limit)
        plan.seconds = time.perf_counter() - began
        return plan

    def _compare(self, estimate: Estimator, given: AssembledJob | None, report: Callable[[str], None]) -> None:
        self._find_kinds()
        if given is not None:
            recipe = self._space.candidate(given, {}, self._space.kind_of(given), given=True)
            self._plan.kinds += recipe.kind not in self._open
            self._open.add(recipe.kind, OpenKind(recipe.mesh, min(recipe.local_batch, LARGEST_MICROBATCH)))
            report(f"{self._plan.kinds:,} kinds of blocks; the recipe")
            self._trace([recipe.kind])
            self._estimate(recipe, estimate)
        for root in self._roots:
            if root in self._open:
                report(f"{self._plan.kinds:,} kinds of blocks; their choices")
                self._trace([root], self._compose_waiting)
        for proves in (False, True):
            # Estimates correct what is composed, so kinds that could not win before may win now.
            while self._trace_what_may_win(proves, report) | self._estimate_best(estimate, report):
                pass

    def _estimate_best(self, estimate: Estimator, report: Callable[[str], None]) -> bool:
        """Estimate the best candidates that were not. Return whether there were some."""
        found = False
        while (best := min(self._promising(), default=None)) is not None:
            number = best[2]
            faster = best[0] < self._fastest() * (1.0 - CLOSE)
            if self._plan.estimated >= self._intended() and not faster:
                break
            if self._left() < self._longest and any(not one.candidate.given for one in self._plan.best):
                break
            report(self._progress())
            candidate, _ = self._composed[number]
            self._done.add(number)
            self._per_mesh[str(candidate.mesh)] += self._estimate(candidate, estimate)
            found = True
        return found

    def _fastest(self) -> float:
        return min((one.figures.step_seconds for one in self._plan.best), default=math.inf)

    def _left(self) -> float:
        """Return the seconds that are left."""
        return math.inf if self._deadline is None else self._deadline - time.perf_counter()

    def _may_trace(self, best: float) -> bool:
        """Whether there is time for more than the estimates that are left to do; if nothing fits, twice as much."""
        if best == math.inf:
            return self._left() > -self._limit
        of_estimates = max(SHARE_OF_ESTIMATES * self._limit, 1.3 * self._longest)
        return self._left() > (of_estimates if best < self._fastest() else 0.0)

    def _find_kinds(self) -> None:
        """List all kinds, and the meshes and local batches on which jobs have them."""
        space, rules = self._space, self._space.rules
        layers = [dim for dim in space.job.mesh.dims if dim.divides == "layers"]
        meshes: dict[tuple[object, ...], dict[bool, MeshPlan]] = defaultdict(dict)  # whether there are stages -> a mesh
        for degrees in space.meshes(sorted({router.experts for router in space.job.model.layout.routers.values()})):
            self._plan.meshes += 1
            mesh = space.mesh(degrees)
            where = space.kind(mesh, {}).where
            meshes[where].setdefault(any(mesh.degrees[dim.name] > 1 for dim in layers), mesh)
            self._groups[where] += [(degrees, local) for local in space.local_batches(degrees)]
        for where, of_kind in meshes.items():
            batch = min(max(local for _, local in self._groups[where]), LARGEST_MICROBATCH)
            for mesh in of_kind.values():
                for kind in space.kinds(mesh):
                    self._open.add(kind, OpenKind(mesh, batch, pipelined=True in of_kind))
        self._plan.kinds = sum(1 for _ in self._open)
        whole = [undivided(mesh, rules.experts) for of_kind in meshes.values() for mesh in of_kind.values()]
        for mesh in {space.kind(mesh, {}): mesh for mesh in whole}.values():
            for kind in space.kinds(mesh):
                self._open.add(kind, OpenKind(mesh, 1, job=False))
        self._roots = self._open.one_of_each_choice()

    def _trace_what_may_win(self, proves: bool, report: Callable[[str], None]) -> bool:
        """Trace the open kinds that may have a job that is faster than the best known one and fits, those with the least
        bound first, and compose their candidates. Return whether there were some.

        Args:
            proves: whether to go by what is proved, in place of what is expected.
        """
        plan, before, at_once = self._plan, self._plan.traced, max(1, len(os.sched_getaffinity(0)) // 2)
        while True:
            best = self._best_step()
            limit = best * (1.0 - CLOSE)
            if proves:
                bounds = {kind: Expected(bound, bound) for kind, bound in self._open.bounds().items()}
            else:
                bounds = self._open.expected()
            worth = [kind for kind, one in bounds.items() if one.step < limit]
            worth.sort(key=lambda kind: (bounds[kind].step, bounds[kind].bound, self._open[kind].size))
            winning = (kind for kind in worth if self._may_win(kind, bounds[kind], limit, proves))
            chosen = list(itertools.islice(winning, at_once)) if self._may_trace(best) else []
            if chosen:
                what = f"{len(worth):,} {'may' if proves else 'are expected to'} win"
                report(f"{plan.traced} of {plan.kinds:,} kinds of blocks traced, {what}; {self._progress()}")
                following = worth[worth.index(chosen[-1]) + 1 :]
                self._trace(chosen, partial(self._look_ahead, following, bounds, limit, proves))
            elif self._waiting:
                self._compose_waiting()  # they may be faster than the best known one
            else:
                return plan.traced > before

    def _look_ahead(self, kinds: Sequence[Kind], bounds: Mapping[Kind, Expected], limit: float, proves: bool) -> None:
        """Compose what was traced, and look for the kind to trace next, while others are traced."""
        until = time.perf_counter() + LOOK_AHEAD
        self._compose_waiting()
        for kind in kinds:
            if time.perf_counter() > until or self._may_win(kind, bounds[kind], limit, proves):
                break

    def _count_open(self) -> None:
        """Note how many kinds may have a job that is faster than the best known one, and by how much."""
        plan, best = self._plan, self._best_step()
        limit, expected = best * (1.0 - CLOSE), self._open.expected()
        jobs = {kind: one for kind in self._open if (one := self._open[kind]).job}
        left = {
            kind: self._least(one) for kind, one in jobs.items()
            if self._least(one) < limit and (self._assembled.suspects.isdisjoint(kind.degrees) or self._is_valid(kind))
        }  # fmt: skip
        plan.open = len(left)
        plan.unproved = 0.0 if not left else 1.0 - min(left.values()) / best
        plan.unexpected = all(max(expected[kind].step, left[kind]) >= limit for kind in left)

    def _least(self, one: OpenKind) -> float:
        """Return what is known of the shortest step of a kind that was not traced, without a look at its jobs."""
        if one.least is None:
            return one.bound * slowdown(one.filled, one.pipelined)
        return one.least * one.bound / one.of_ancestor

    def _may_win(self, kind: Kind, expected: Expected, limit: float, proves: bool) -> bool:
        """Whether a job of a kind that was not traced may fit, and take less than ``limit`` seconds.

        Args:
            proves: whether to go by what is proved.
        """
        one = self._open[kind]
        if not one.job:
            return True
        if not self._is_valid(kind):
            return False
        if one.ancestor is None:
            return True
        slower = expected.bound / one.of_ancestor
        if one.least is None:
            one.least = one.of_ancestor * slowdown(one.filled, one.pipelined)
        rejected = self._rejected[kind.chosen]
        if one.least * slower >= limit or (not proves and any(map(expected.is_no_better, rejected))):
            return False
        if one.guess is None:
            one.least, one.guess = self._least_and_guess(kind, one.ancestor, one.least)
        if proves:
            return one.least * slower < limit
        if one.guess * slower >= limit:
            rejected.append(expected)
        return one.guess * slower < limit

    def _least_and_guess(self, kind: Kind, ancestor: Kind, least: float) -> tuple[float, float]:
        """Return a bound of the jobs of a kind that fit, and the shortest step of those that may fit, if their blocks were
        those of ``ancestor``, evenly divided."""
        limit = self._machine.memory_gib
        found = guess = math.inf
        for each in self._variants(kind):
            if isinstance(each, Candidate):
                seconds, gib = self._composer.least(each, ancestor)
                found = min(found, seconds if gib <= limit else math.inf)
                if gib <= limit and seconds < guess:
                    composed = self._composer.composition(each, ancestor, Worth(guess, NEARLY * limit))
                    guess = min(guess, composed.step_seconds if composed.peak_gib <= NEARLY * limit else math.inf)
        return max(least, found), guess

    def _is_valid(self, kind: Kind) -> bool:
        return self._assembled.accepts_kind(kind, self._groups[kind.where], str(self._open[kind].mesh))

    def _variants(self, kind: Kind) -> list[Candidate | Refused]:
        """Return all candidates of a kind, and combinations that a check rejects."""
        if kind not in self._candidates:
            found: list[Candidate | Refused] = []
            for degrees, local in self._groups[kind.where]:
                values = {**degrees, GLOBAL_BATCH: self._space.global_batch, LOCAL_BATCH: local}
                found += self._space.variants(self._space.assumed(degrees, local), values, kind)
            self._candidates[kind] = found
        return self._candidates[kind]

    def _trace(self, kinds: Sequence[Kind], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Trace kinds.

        Args:
            meanwhile: called while other processes trace.
        """
        found = {kind: self._open.pop(kind) for kind in kinds}
        self._composer.trace({kind: one.mesh for kind, one in found.items()}, meanwhile)
        for kind, one in found.items():
            self._plan.traced += one.job
            why = self._composer.failure(kind)
            if why is not None:
                problem = refusal(why.problems[0], str(one.mesh)) if isinstance(why, UserError) else None
                self._refused.append(problem or Refused(str(one.mesh), SIMULATION, str(why)))
                continue
            self._open.learn(kind, one.batch)
            self._waiting.append(kind)

    def _compose_waiting(self) -> None:
        while self._waiting:
            self._compose(self._waiting.pop())

    def _compose(self, kind: Kind) -> None:
        """Compose all candidates of a kind, those first that take least without data parallelism."""
        best, memory_gib = self._best_step(), self._machine.memory_gib

        def least(one: Candidate | Refused) -> float:
            return 0.0 if isinstance(one, Refused) else self._composer.least(one, kind)[0]

        for one in sorted(self._variants(kind), key=least):
            self._plan.candidates += 1
            if isinstance(one, Refused):
                self._refused.append(one)
            elif any(each not in self._machine.matmul for each in one.matmul_types):
                why = f"{self._machine.name} does not compute in it"
                self._refused.append(Refused(str(one.mesh), one.matmul_types[0], why))
            else:
                composed = self._composer.composition(one, worth=Worth(NEARLY * best, NEARLY * memory_gib))
                self._composed.append((one, composed))
                best = min(best, composed.step_seconds if composed.peak_gib <= memory_gib else math.inf)

    def _best_step(self) -> float:
        """Return the shortest known step of a candidate that fits, by estimate or composed; infinity if none is known."""
        limit = self._machine.memory_gib
        fitting = sorted((seconds, number) for seconds, memory, number in self._corrected() if memory <= limit)
        composed = (seconds for seconds, number in fitting if self._assembled.accepts(self._composed[number][0]))
        return min(self._fastest(), next(composed, math.inf))

    def _corrected(self) -> Iterator[tuple[float, float, int]]:
        """Yield seconds, GiB and position of all composed candidates, as estimates of the like correct them."""
        for number, (candidate, composed) in enumerate(self._composed):
            if self._assembled.is_refused(candidate):
                continue
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

    def _estimate(self, candidate: Candidate, estimate: Estimator) -> bool:
        """Estimate a finalist, and learn from it how good compositions are. Return whether the job can run, and fits."""
        plan, limit, began = self._plan, self._machine.memory_gib, time.perf_counter()
        try:
            figures = estimate(() if candidate.given else candidate.overrides)
        except UserError as error:
            self._refused.append(refusal(error.problems[0], str(candidate.mesh)))
            return False
        except Exception as error:  # noqa: BLE001 - one that cannot be simulated is reported among the losers
            lines = str(error).strip().splitlines() or [""]
            self._refused.append(Refused(describe(candidate), SIMULATION, f"{type(error).__name__}: {lines[0]}"))
            return False
        self._longest = max(self._longest, time.perf_counter() - began)
        if self._composer.failure(candidate.kind) is not None:  # the recipe's own blocks, which only an estimate knows
            composed = Composition({"activations": figures.peak_gib * GIB}, {"compute": figures.step_seconds})
        else:
            composed = self._composer.composition(candidate)
        (plan.best if figures.peak_gib <= limit else plan.too_large).append(Finalist(candidate, composed, figures))
        activations = composed.memory["activations"] / 2**30
        of_memory = (figures.peak_gib - composed.peak_gib + activations) / activations if activations > 0 else 1.0
        of_time = figures.step_seconds / composed.step_seconds
        self._factors[candidate.choices] = of_time, min(4.0, max(0.1, of_memory))
        return figures.peak_gib <= limit
