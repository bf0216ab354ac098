"""The stage of a run that ``titan plan`` plans, and the later ones that inherit what it decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from titan_core.api import CommandContext, Config, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.estimate.stages import number_of_stage, step_of

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate
    from titan_simulate.estimate.traced_rank import JobOf


@dataclass(frozen=True)
class StagedFigures:
    """What a candidate needs: the speed of the planned stage, and the memory of the largest one that it decides about."""

    peak_gib: float
    step_seconds: float
    tokens_per_second_per_gpu: float
    mfu: float
    largest: str
    """Name of the stage that needs ``peak_gib``."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a recipe with ``[[stages]]``."""

    context: CommandContext
    whole: AssembledJob
    """The run, on any number of ranks."""
    number: int
    gpus: int

    @property
    def name(self) -> str:
        """Name of the stage."""
        return self.whole.stages[self.number].name

    def job_of(self, more: Sequence[Override]) -> AssembledJob:
        """Return the job of the stage with overrides."""
        return self._stage(self.number, more)

    def checked(self, more: Sequence[Override]) -> AssembledJob:
        """Return the job of the stage, if those that inherit the overrides are valid too.

        Raises:
            UserError: one is not.
        """
        list(self.later(more))
        return self.job_of(more)

    def any_job(self) -> AssembledJob:
        """Return the job of the stage on the number of ranks of the recipe."""
        return self.context.stage(self.whole, self.number, missing_ok=True)

    def later(self, more: Sequence[Override]) -> Iterator[tuple[str, JobOf]]:
        """Yield name and job of each later stage that runs on the planned mesh and whose step is not that of another.

        Raises:
            UserError: a stage is invalid with the overrides.
        """
        seen = {step_of(self.job_of(more))}
        for number in self.inheriting:
            own = self._own_keys(number)
            inherited = [one for one in more if one.key not in own]
            step = step_of(self._stage(number, inherited))
            if step not in seen:
                seen.add(step)
                yield self.whole.stages[number].name, self._with(number, inherited)

    def estimated(self, more: Sequence[Override], estimate: Callable[[JobOf], Estimate], limit: float) -> StagedFigures:
        """Estimate the stage with overrides, and those that inherit them unless it needs more than ``limit`` GiB itself."""
        later = list(self.later(more))  # before anything is simulated
        own = estimate(self._with(self.number, more))
        peaks = {self.name: own.peak_gib}
        if own.peak_gib <= limit:
            peaks |= {name: estimate(job_of).peak_gib for name, job_of in later}
        largest = max(peaks, key=lambda name: peaks[name])
        return StagedFigures(peaks[largest], own.step_seconds, own.tokens_per_second_per_gpu, own.mfu, largest)

    @cached_property
    def inheriting(self) -> list[int]:
        """Numbers of the later stages that take place and set no degree of the mesh, so that the plan decides about them."""
        return [number for number in self._after if not self._sets_mesh(number)]

    @cached_property
    def apart(self) -> list[int]:
        """Numbers of the later stages that take place, and have a mesh of their own."""
        return [number for number in self._after if self._sets_mesh(number)]

    def config(self, config: Config, values: Mapping[str, Any]) -> Config:
        """Return the recipe's ``config`` with the values of a candidate in the entry of this stage, which is not the first
        one."""
        stages = list(config.stages)
        table = {
            key: dict(value) if isinstance(value, dict) else value for key, value in stages[self.number - 1].table.items()
        }
        for key, value in values.items():
            section, _, name = key.partition(".")
            table.setdefault(section, {}).pop(name, None)
            if value is not None:
                table[section][name] = value
        stages[self.number - 1] = replace(
            stages[self.number - 1], table={key: one for key, one in table.items() if one != {}}
        )
        return replace(config, stages=tuple(stages))

    def describe(self) -> str:
        """Return what is planned, and what is not, in one line or two."""
        job = self.context.stage(self.whole, self.number, missing_ok=True)
        text = f"stage {self.name!r} of {len(self.whole.stages)}, steps {job.first_step + 1:,} to {job.end_step:,}"
        if self.inheriting:
            text += f"; candidates must also be valid in and fit {self._names(self.inheriting)}"
        if self.apart:
            text += f"\nnot planned: {self._names(self.apart)}, whose mesh is set there (--stage NAME plans it)"
        return text

    def as_json(self) -> dict[str, Any]:
        """Return the same as plain values."""
        names = [stage.name for stage in self.whole.stages]
        return {
            "name": self.name,
            "also": [names[number] for number in self.inheriting],
            "not_planned": [names[number] for number in self.apart],
        }

    @property
    def _after(self) -> list[int]:
        stages, steps = self.whole.stages, self.whole.steps
        return [number for number in range(self.number + 1, len(stages)) if stages[number].first_step < steps]

    def _names(self, numbers: Sequence[int]) -> str:
        return "stage" + "s" * (len(numbers) > 1) + " " + ", ".join(repr(self.whole.stages[one].name) for one in numbers)

    def _sets_mesh(self, number: int) -> bool:
        own, mesh = self._own_keys(number), self.whole.mesh
        return not own.isdisjoint({dim.degree_key for dim in mesh.dims} | {view.degree_key for view in mesh.views})

    def _own_keys(self, number: int) -> set[str]:
        """Return the keys that stages after the planned one set, until stage ``number``."""
        tables = [stage.table for stage in self.whole.run_config.stages[self.number : number]]
        return {
            f"{section}.{key}"
            for table in tables
            for section, values in table.items()
            if isinstance(values, dict)
            for key in values
        }

    def _with(self, number: int, overrides: Sequence[Override]) -> JobOf:
        return lambda more: self._stage(number, [*overrides, *more])

    def _stage(self, number: int, more: Sequence[Override]) -> AssembledJob:
        return self.context.stage(self.whole, number, more, missing_ok=True, world_size=self.gpus)


def planned_stage(context: CommandContext, gpus: int, name: str | None) -> PlannedStage | None:
    """Return the stage of the recipe that ``name`` names (default: the first one); ``None`` if it has no stages.

    Raises:
        UserError: it has no such stage, or the recipe has a mistake that has nothing to do with the number of devices.
    """
    if name is None and not context.config().stages:
        return None
    try:
        whole = context.job(gpus, missing_ok=True)
    except UserError:
        whole = context.job(None, missing_ok=True)
    return PlannedStage(context, whole, 0 if name is None else number_of_stage(whole, name), gpus)
