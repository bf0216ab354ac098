"""The keys of phases of the learning rate. They extend the core's section ``[lr_scheduler]``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from titan_core.api import NonNegativeFloat, PositiveInt, Section

NAME: Final = "phases"
"""Name of the schedule, and of its key."""
BETWEEN: Final = ("linear", "cosine", "sqrt", "polynomial")
"""Shapes that lead from one factor to another."""
FALLING: Final = ("power", "inverse_sqrt")
"""Shapes that fall with the distance from the start of training."""
MOST_TOKENS: Final = 10**18


class LRPhase(BaseModel):
    """A part of the training, with its own shape of the learning rate.

    With ``p`` the part of the phase that is over, ``t`` the steps or tokens since the start of training, and ``t0`` those
    before the phase, the factor is

    * ``constant``: ``start``
    * ``linear``: ``start + (end - start) * p``
    * ``cosine``: ``end + (start - end) * (1 + cos(pi * p)) / 2``
    * ``sqrt``: ``start + (end - start) * sqrt(p)``, as ``decay_type = "sqrt"`` of the core's schedule
    * ``polynomial``: ``end + (start - end) * (1 - p) ** exponent``
    * ``power``: ``start * (t / t0) ** -exponent``
    * ``inverse_sqrt``: ``start * (t / t0) ** -0.5``
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True, allow_inf_nan=False)

    shape: Literal["constant", "linear", "cosine", "sqrt", "polynomial", "power", "inverse_sqrt"]
    """How the factor on the learning rate changes during the phase."""
    steps: PositiveInt | None = None
    """Length of the phase in steps."""
    tokens: Annotated[int, Field(le=MOST_TOKENS)] | None = Field(default=None, gt=0)
    """Length of the phase in tokens of the global batch, in place of steps. The last phase needs no length if its shape is
    "constant", "power" or "inverse_sqrt"."""
    start_factor: NonNegativeFloat | None = None
    """Learning rate of the phase's first step, as a fraction of the peak. Default: where the phase before it ends, and 1.0
    for the first phase."""
    end_factor: NonNegativeFloat | None = None
    """Learning rate of the first step after the phase, for shapes that lead somewhere: all but "constant", "power" and
    "inverse_sqrt"."""
    exponent: float | None = Field(default=None, gt=0.0, le=100.0)
    """Exponent of "polynomial" and "power"."""
    jump: bool = False
    """Whether start_factor may differ from the end of the phase before it."""

    @model_validator(mode="after")
    def _is_whole(self) -> LRPhase:
        if self.steps is not None and self.tokens is not None:
            raise ValueError("has a length in steps and one in tokens: remove one")
        if self.shape in BETWEEN:
            if self.steps is None and self.tokens is None:
                raise ValueError(f"a {self.shape} phase needs a length: set steps or tokens")
            if self.end_factor is None:
                raise ValueError(f"a {self.shape} phase needs an end_factor")
        elif self.end_factor is not None:
            raise ValueError(f"end_factor has no effect on a phase of shape {self.shape!r}: remove it")
        if self.shape in ("polynomial", "power"):
            if self.exponent is None:
                raise ValueError(f"a {self.shape} phase needs an exponent")
        elif self.exponent is not None:
            raise ValueError(f"exponent has no effect on a phase of shape {self.shape!r}: remove it")
        if self.jump and self.start_factor is None:
            raise ValueError("jump = true needs a start_factor to jump to")
        return self

    @property
    def open_ended(self) -> bool:
        """Whether the phase lasts until the end of training."""
        return self.steps is None and self.tokens is None


class LRPhasesSection(Section):
    """The key of the section that the schedule reads. A factor that jumps from one phase to the next is refused, unless the
    phase says ``jump``."""

    section: ClassVar[str] = "lr_scheduler"

    phases: list[LRPhase] | None = Field(default=None, min_length=1, max_length=1000)
    """Phases of the learning rate, one after the other, for lr_scheduler.name = "phases"."""

    @model_validator(mode="after")
    def _follow_each_other(self) -> LRPhasesSection:
        end: float | None = None  # not known of phases that fall
        for number, phase in enumerate(self.phases or ()):
            problem = _mistake(phase, end, first=number == 0, last=number + 1 == len(self.phases or ()))
            if problem:
                raise ValueError(f"phases[{number}]: {problem}")
            start = _start(phase, end, first=number == 0)
            end = start if phase.shape == "constant" else phase.end_factor
        return self


def _start(phase: LRPhase, before: float | None, first: bool) -> float | None:
    """Return the factor at the start of ``phase``, ``None`` if it depends on the job.

    Args:
        before: factor at the end of the phase before it.
    """
    if phase.start_factor is not None:
        return phase.start_factor
    return 1.0 if first else before


def _mistake(phase: LRPhase, before: float | None, first: bool, last: bool) -> str:
    """Return what is wrong with the place of ``phase`` among the others; empty if nothing is."""
    start = _start(phase, before, first)
    if phase.open_ended and not last:
        return "only the last phase can be without a length: set steps or tokens"
    if first and phase.shape in FALLING:
        return f"a phase of shape {phase.shape!r} falls with the steps before it, so it cannot be the first: add a warmup"
    if first and phase.jump:
        return "there is no phase before it to jump from: remove jump"
    if not first and phase.start_factor is not None:
        if phase.jump and phase.start_factor == before:
            return f"the phase before it ends at {before:g} too, so there is no jump: remove jump"
        if not phase.jump and phase.start_factor != before:
            where = "somewhere that depends on the job" if before is None else f"at {before:g}"
            return (
                f"it starts at {phase.start_factor:g}, and the phase before it ends {where}: set jump = true to allow that"
            )
    if phase.shape in BETWEEN and start == phase.end_factor:
        return f"it leads from {start:g} to {start:g}: set start_factor, or shape = 'constant'"
    return ""
