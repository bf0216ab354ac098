"""The search: assemble, guess, estimate the most promising, and say why the others lost."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from titan_core.api import UserError
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.hardware.machine import Machine
from titan_simulate.plan.arithmetic import Arithmetic
from titan_simulate.plan.candidates import GLOBAL_BATCH, LOCAL_BATCH, Candidate, JobOf, Refused, Space, refusal
from titan_simulate.plan.model_sizes import ModelSizes
from titan_simulate.plan.workload import Guess

MARGIN = 1.25
"""Candidates whose guessed memory is up to this factor too large may fit; only an estimate knows."""
SIMULATION = "its simulation failed"
"""In place of the key of :class:`Refused`, for a candidate whose estimate raised another error than a UserError."""
PER_MESH = 2
"""Most finalists on one mesh, so that they differ in more than details."""


FEW_MESHES = 64
"""Meshes that are compared whatever it takes."""
MOST_CANDIDATES = 16_000
"""Candidates after which no further mesh is compared. They take half a minute."""


class Figures(Protocol):
    """What an estimate says (:class:`titan_simulate.estimate.estimate.Estimate`)."""

    @property
    def peak_gib(self) -> float:
        """Largest memory of a device."""
        ...

    @property
    def step_seconds(self) -> float:
        """Duration of a step."""
        ...

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Speed."""
        ...

    @property
    def mfu(self) -> float:
        """Share of the machine's peak."""
        ...


Estimator = Callable[[Sequence[Override]], Figures]
"""Overrides -> the estimate of the job. Raises UserError if the job cannot run."""


@dataclass(frozen=True)
class Finalist:
    """A candidate with its estimate."""

    candidate: Candidate
    guess: Guess
    figures: Figures


@dataclass(frozen=True)
class Loser:
    """A group of candidates that lost for one reason."""

    why: str
    count: int
    example: str
    """The best of them."""
    detail: str


TIME_LIMIT, INTERRUPTED = "the time limit", "an interrupt"
"""Why a search may end early."""


@dataclass
class Plan:
    """The result of a search."""

    wanted: int
    """Number of finalists to estimate."""
    best: list[Finalist] = field(default_factory=list)
    """Finalists that fit, fastest first. Only what was estimated is ranked."""
    too_large: list[Finalist] = field(default_factory=list)
    """Finalists that do not fit, smallest first."""
    losers: list[Loser] = field(default_factory=list)
    nearest: tuple[Candidate, float] | None = None
    """If nothing fits: the candidate that needs least memory, in GiB. ``None`` too if those that fit cannot be estimated."""
    meshes: int = 0
    candidates: int = 0
    """Compared by arithmetic, or refused by a check."""
    seconds: float = 0.0
    stopped: str | None = None
    """What ended the search before all finalists were estimated: :data:`TIME_LIMIT` or :data:`INTERRUPTED`."""
    model: str = ""
    """The model in words."""

    skipped: int = 0
    """Of the meshes, those on which no candidate was compared, because examples on all others are faster."""

    @property
    def estimated(self) -> int:
        """Number of candidates that were compared by estimate."""
        return len(self.best) + len(self.too_large)

    @property
    def winner(self) -> Finalist | None:
        """The fastest candidate; ``None`` if none fits, or if the comparison is not finished."""
        return self.best[0] if self.best and self.stopped is None else None


class Search:
    """One search for the best candidates of a space on a machine."""

    def __init__(self, space: Space, sizes: ModelSizes, machine: Machine, job_of: JobOf, imbalance: float = 1.0) -> None:
        self._space, self._machine, self._job_of = space, machine, job_of
        self._sizes = sizes
        self._arithmetic = Arithmetic(sizes, machine, imbalance)
        self._refused: list[Refused] = []
        self._plan = Plan(0)
        self._longest = 0.0  # seconds of an estimate
        self._guesses: list[tuple[Candidate, Guess]] = []
        self._done: set[int] = set()  # positions of guesses whose candidates were estimated
        self._factors: dict[tuple[object, ...], float] = {}  # kind -> correction of the guessed activations

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
            deadline: seconds after which an estimate must not end, judged by the longest one so far, once a candidate fits.
            report: receives how far the search is, in words.
        """
        began = time.perf_counter()
        plan = self._plan = Plan(finalists)
        try:
            self._compare(estimate, given, None if deadline is None else began + deadline, report)
        except KeyboardInterrupt:
            plan.stopped = INTERRUPTED
        plan.best.sort(key=lambda one: one.figures.step_seconds)
        plan.too_large.sort(key=lambda one: one.figures.peak_gib)
        if not plan.best and plan.stopped is None:
            plan.nearest = self._nearest()
        plan.losers = [*self._slower(), *self._explained(), *self._refusals()]
        plan.seconds = time.perf_counter() - began
        return plan

    def _compare(
        self, estimate: Estimator, given: AssembledJob | None, deadline: float | None, report: Callable[[str], None]
    ) -> None:  # fmt: skip
        plan = self._plan
        for pair in self._guessed():
            self._guesses.append(pair)
            if len(self._guesses) % 200 == 0:
                report(f"{plan.candidates:,} candidates compared by arithmetic")
        if given is not None:
            values = {dim.degree_key: given.mesh.degrees[dim.name] for dim in given.mesh.dims}
            own = Candidate({**values, GLOBAL_BATCH: self._space.global_batch}, self._space.workload(given), given=True)
            report(self._progress())
            self._estimate(own, self._arithmetic.guess(own.workload), estimate)
            self._done |= {number for number, (one, _) in enumerate(self._guesses) if one.workload == own.workload}
        per_mesh: dict[str, int] = defaultdict(int)
        while plan.estimated < self._intended():
            best = min(self._promising(per_mesh), default=None)
            if best is None:
                return
            if plan.best and deadline is not None and time.perf_counter() + self._longest > deadline:
                plan.stopped = TIME_LIMIT
                return
            report(self._progress())
            number = best[2]
            candidate, guess = self._guesses[number]
            ran = self._estimate(candidate, guess, estimate)
            self._done.add(number)
            if ran:
                per_mesh[str(candidate.workload.mesh)] += 1

    def _intended(self) -> int:
        return self._plan.wanted * (1 if self._plan.best else 2)

    def _promising(self, per_mesh: Mapping[str, int]) -> Iterator[tuple[float, int, int]]:
        """Yield guessed seconds, dimensions and position of the candidates that may be estimated next."""
        for number, (candidate, guess) in enumerate(self._guesses):
            if number in self._done or per_mesh[str(candidate.workload.mesh)] >= PER_MESH:
                continue
            if corrected(guess, self._factors.get(candidate.kind)) <= self._machine.memory_gib:
                yield guess.step_seconds, len(_degrees(candidate)), number

    def _progress(self) -> str:
        """Return how far the estimates are. One takes seconds, or with many stages minutes."""
        plan = self._plan
        fastest = max((one.figures.tokens_per_second_per_gpu for one in plan.best), default=None)
        text = f"{plan.estimated} of {self._intended()} candidates estimated"
        return text if fastest is None else f"{text}; fastest so far {fastest:,.0f} tokens/s per GPU"

    def _guessed(self) -> Iterator[tuple[Candidate, Guess]]:
        """Guess all candidates on all meshes that assembly accepts."""
        for degrees in self._meshes():
            accepted = hopeless = False
            for local in self._space.local_batches(degrees):
                values = {**degrees, GLOBAL_BATCH: self._space.global_batch, LOCAL_BATCH: local}
                for candidate in self._space.variants(self._space.assumed(degrees, local), values):
                    self._plan.candidates += 1
                    if isinstance(candidate, Refused):
                        self._refused.append(candidate)
                        continue
                    work = candidate.workload
                    if work.matmul_type not in (*self._machine.matmul, work.wide_type):
                        why = f"{self._machine.name} does not compute in it"
                        self._refused.append(Refused(str(work.mesh), work.matmul_type, why))
                        continue
                    if not accepted and not self._assembles(candidate):
                        break
                    accepted = True
                    guess = self._arithmetic.guess(work)
                    yield candidate, guess
                    if hopeless := guess.least_gib > self._machine.memory_gib:
                        break
                if not accepted or hopeless:
                    break

    def _meshes(self) -> Iterator[dict[str, int]]:
        """Yield all meshes; of many, those with the best examples first, until enough candidates are compared."""
        meshes = list(self._space.meshes(self._sizes.num_experts))
        self._plan.meshes = len(meshes)
        if len(meshes) > FEW_MESHES:
            outlooks: dict[tuple[int, ...], float] = {}
            meshes.sort(key=lambda degrees: self._outlook(degrees, outlooks))
        for number, degrees in enumerate(meshes):
            if number >= FEW_MESHES and self._plan.candidates >= MOST_CANDIDATES:
                self._plan.skipped = len(meshes) - number
                return
            yield degrees

    def _outlook(self, degrees: dict[str, int], known: dict[tuple[int, ...], float]) -> float:
        """Return the guessed seconds of the fastest example on a mesh. Views without parameters do not matter."""
        mesh = self._space.job.mesh
        without = {view.degree_key for view in mesh.views if not view.shards_parameters}
        key = tuple(degree for name, degree in degrees.items() if name not in without)
        if key not in known:
            known[key] = min(self._arithmetic.outlook(job) for job in self._space.examples(degrees))
        return known[key]

    def _assembles(self, candidate: Candidate) -> bool:
        """Whether a job on the mesh of ``candidate`` is valid, by its own assembly."""
        try:
            self._job_of(candidate.overrides)
        except UserError as error:
            self._refused.append(refusal(error.problems[0], str(candidate.workload.mesh)))
            return False
        return True

    def _estimate(self, candidate: Candidate, guess: Guess, estimate: Estimator) -> bool:
        """Estimate a finalist, and learn from it how good guesses are. Return whether the job can run."""
        plan, limit = self._plan, self._machine.memory_gib
        started = time.perf_counter()
        try:
            figures = estimate(() if candidate.given else candidate.overrides)
        except UserError as error:
            self._refused.append(refusal(error.problems[0], str(candidate.workload.mesh)))
            return False
        except Exception as error:  # noqa: BLE001 - one that cannot be simulated is reported among the losers
            lines = str(error).strip().splitlines() or [""]
            self._refused.append(Refused(describe(candidate), SIMULATION, f"{type(error).__name__}: {lines[0]}"))
            return False
        self._longest = max(self._longest, time.perf_counter() - started)
        (plan.best if figures.peak_gib <= limit else plan.too_large).append(Finalist(candidate, guess, figures))
        activations = guess.memory["activations"] / 2**30
        if activations > 0:
            factor = (figures.peak_gib - guess.peak_gib + activations) / activations
            self._factors[candidate.kind] = min(4.0, max(0.1, factor))
        return True

    def _nearest(self) -> tuple[Candidate, float] | None:
        if self._plan.too_large:
            smallest = self._plan.too_large[0]
            return smallest.candidate, smallest.figures.peak_gib
        too_large = [pair for pair in self._guesses if pair[1].peak_gib > self._machine.memory_gib]
        if not too_large:  # what fits could not be estimated, or was refused
            return None
        candidate, guess = min(too_large, key=lambda pair: pair[1].peak_gib)
        return candidate, guess.peak_gib

    def _slower(self) -> Iterator[Loser]:
        for one in self._plan.too_large:
            over = one.figures.peak_gib - self._machine.memory_gib
            detail = f"needs {one.figures.peak_gib:.1f} GiB, {over:.1f} too many (estimated)"
            yield Loser("does not fit", 1, describe(one.candidate), detail)

    def _explained(self) -> Iterator[Loser]:
        """Group candidates that were not estimated by their reason."""
        factors = self._factors
        rest = [pair for number, pair in enumerate(self._guesses) if number not in self._done]
        limit = self._machine.memory_gib
        best = self._plan.best[0].guess if self._plan.best else None
        groups: dict[str, list[tuple[Candidate, Guess]]] = defaultdict(list)
        for candidate, guess in rest:
            if corrected(guess, factors.get(candidate.kind)) > limit:
                groups["does not fit"].append((candidate, guess))
            elif best is not None:
                groups[_reason(guess, best)].append((candidate, guess))
        for why, members in sorted(groups.items(), key=lambda item: -len(item[1])):
            if why == "does not fit":
                candidate, guess = min(members, key=lambda pair: pair[1].peak_gib)
                kind = max(guess.memory, key=lambda name: guess.memory[name])
                peak = corrected(guess, factors.get(candidate.kind), exact=True)
                detail = f"needs about {peak:.1f} GiB, {guess.memory[kind] / 2**30:.1f} of them {kind}"
            else:
                candidate, guess = min(members, key=lambda pair: pair[1].step_seconds)
                assert best is not None
                detail = _speed(best.step_seconds / guess.step_seconds)
            yield Loser(why, len(members), describe(candidate), detail)

    def _refusals(self) -> Iterator[Loser]:
        groups: dict[str, list[Refused]] = defaultdict(list)
        for one in self._refused:
            groups[one.key].append(one)
        for key, members in sorted(groups.items(), key=lambda item: -len(item[1])):
            yield Loser(key if key == SIMULATION else f"refused: {key}", len(members), members[0].mesh, members[0].why)


def corrected(guess: Guess, factor: float | None, exact: bool = False) -> float:
    """Return the guessed memory in GiB with the activations that estimates of the same kind suggest; without any estimate,
    the least that it may be."""
    if factor is None:
        return guess.peak_gib / (1.0 if exact else MARGIN)
    return guess.peak_gib + guess.memory["activations"] / 2**30 * (factor - 1)


def _speed(share: float) -> str:
    """Describe a candidate with ``share`` times the tokens/s of the best; all take the same tokens in a step."""
    if abs(share - 1) < 0.005:
        return "about as fast, not estimated"
    more, fewer = (
        f"about {share - 1:.0%} more tokens/s, not estimated",
        f"about {1 - share:.0%} fewer tokens/s than the best",
    )
    return more if share > 1 else fewer


def _reason(guess: Guess, best: Guess) -> str:
    """Return what makes a candidate slower than the best one: where it takes most more time."""
    more = {kind: guess.seconds.get(kind, 0.0) - best.seconds.get(kind, 0.0) for kind in {**guess.seconds, **best.seconds}}
    kind = max(more, key=lambda name: more[name])
    if kind == "idle":
        return "pipeline bubble"
    if kind in ("compute", "recomputation", "host", "update"):
        return {
            "compute": "computation: small matmuls or an uneven pipeline",
            "host": "the host: small microbatches",
            "update": "optimizer step",
        }.get(kind, kind)
    return f"network: {kind}"


def _degrees(candidate: Candidate) -> dict[str, int]:
    mesh = candidate.workload.mesh
    degrees = {**mesh.degrees, **mesh.view_degrees}
    return {name: degree for name, degree in degrees.items() if degree > 1}


def describe(candidate: Candidate) -> str:
    """Return a candidate in one line: its mesh, its batch, and the choices of transforms."""
    mesh = candidate.workload.mesh
    keys = {dim.degree_key for dim in mesh.dims} | {view.degree_key for view in mesh.views} | {GLOBAL_BATCH, LOCAL_BATCH}
    chosen = [
        f"{short(key)} {_shown(value)}" for key, value in candidate.values.items() if key not in keys and value is not None
    ]
    work = candidate.workload
    batch = f"batch {work.local_batch}" + (f" x {work.microbatches}" if work.microbatches > 1 else "")
    return ", ".join([str(mesh), batch, *chosen])


def short(key: str) -> str:
    """Return the last words of a config key: ``"activation_checkpoint.mode"`` -> ``"activation_checkpoint"``."""
    section, _, name = key.partition(".")
    return section if name in ("mode", "enable") else name.removeprefix("pipeline_parallel_").removeprefix("fsdp_")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
