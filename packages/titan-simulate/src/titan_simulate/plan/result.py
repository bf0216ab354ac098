"""Result of a search, and descriptions of its candidates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from titan_simulate.plan.candidates import Candidate
from titan_simulate.plan.compose import DATA_PARALLEL, Composition
from titan_simulate.plan.kinds import GLOBAL_BATCH, LOCAL_BATCH

CLOSE = 0.02
"""Two jobs whose steps differ by less than this share are equally fast: estimates are no better."""


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


@dataclass(frozen=True)
class Finalist:
    """A candidate with its estimate."""

    candidate: Candidate
    composed: Composition
    figures: Figures


@dataclass(frozen=True)
class Loser:
    """A group of candidates that lost for one reason."""

    why: str
    count: int
    example: str
    """The best of them."""
    detail: str


INTERRUPTED = "an interrupt"
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
    """Composed, or refused by a check."""
    kinds: int = 0
    """Kinds of blocks that jobs of the plan may have."""
    traced: int = 0
    """Of these, those that were traced."""
    unexpected: bool = True
    """Whether none of the others is expected to be faster than the best one."""
    open: int = 0
    """Kinds that were not traced, and that no bound excludes."""
    unproved: float = 0.0
    """By which share a job of another kind may still be faster than the best one: 0 if none is faster by more than
    :data:`CLOSE`."""
    seconds: float = 0.0
    stopped: str | None = None
    """What ended the search before all finalists were estimated: :data:`INTERRUPTED`."""
    model: str = ""
    """The model in words."""

    @property
    def estimated(self) -> int:
        """Number of candidates that were estimated."""
        return len(self.best) + len(self.too_large)

    @property
    def winner(self) -> Finalist | None:
        """The fastest candidate; ``None`` if none fits, or if the comparison is not finished."""
        return self.best[0] if self.best and self.stopped is None else None


def speed(share: float) -> str:
    """Describe a candidate with ``share`` times the tokens/s of the best; all take the same tokens in a step."""
    if abs(share - 1) < CLOSE / 2:
        return "about as fast, not estimated"
    more, fewer = (
        f"about {share - 1:.0%} more tokens/s, not estimated",
        f"about {1 - share:.0%} fewer tokens/s than the best",
    )
    return more if share > 1 else fewer


def reason(one: Composition, best: Composition) -> str:
    """Return what makes a candidate slower than the best one: where it takes most more time."""
    more = {
        kind: one.seconds.get(kind, 0.0) - best.seconds.get(kind, 0.0) for kind in {**one.seconds, **best.seconds}
    }  # fmt: skip
    kind = max(more, key=lambda name: more[name])
    return {
        "idle": "pipeline bubble",
        "compute": "computation: recomputation, small matmuls or an uneven pipeline",
        "update": "optimizer step",
        DATA_PARALLEL: f"network: {DATA_PARALLEL}",
    }.get(kind, f"network: {kind.removeprefix('mesh_')}")


def degrees_of(candidate: Candidate) -> dict[str, int]:
    """Return the degrees above 1 of its mesh, by name of dimension or view."""
    mesh = candidate.mesh
    degrees = {**mesh.degrees, **mesh.view_degrees}
    return {name: degree for name, degree in degrees.items() if degree > 1}


def describe(candidate: Candidate) -> str:
    """Return a candidate in one line: its mesh, its batch, and the choices of transforms."""
    mesh = candidate.mesh
    keys = {dim.degree_key for dim in mesh.dims} | {view.degree_key for view in mesh.views} | {GLOBAL_BATCH, LOCAL_BATCH}
    chosen = [
        f"{short(key)} {_shown(value)}" for key, value in candidate.values.items() if key not in keys and value is not None
    ]
    batch = f"batch {candidate.local_batch}" + (f" x {candidate.microbatches}" if candidate.microbatches > 1 else "")
    return ", ".join([str(mesh), batch, *chosen])


def short(key: str) -> str:
    """Return the last words of a config key: ``"activation_checkpoint.mode"`` -> ``"activation_checkpoint"``."""
    section, _, name = key.partition(".")
    return section if name in ("mode", "enable") else name.removeprefix("pipeline_parallel_").removeprefix("fsdp_")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
