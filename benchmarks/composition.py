"""Jobs composed of traced blocks, as ``titan plan`` does, against ``titan estimate`` of the same jobs.

    uv run python -m benchmarks.composition RECIPE GPUS [--jobs N] [--seed S] [KEY=VALUE ...]
    uv run python -m benchmarks.composition llama3_debug 4 --every training.global_batch_size=16

Draws jobs from all candidates of a plan and prints the composed time and memory relative to those of the estimate. With
``--every``, it estimates each candidate of a small space, and compares the fastest one that fits with the plan's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from titan_core.api import UserError
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.registry import Components
from titan_simulate.engine import forks, stub_libraries
from titan_simulate.hardware.read import read_machine
from titan_simulate.plan.candidates import Candidate, Space
from titan_simulate.plan.kinds import GLOBAL_BATCH, LOCAL_BATCH, SmallJob, Taken, take_all

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate
    from titan_simulate.plan.compose import Composition


def candidates(space: Space) -> Iterator[list[Candidate]]:
    """Yield the candidates on each mesh and local batch."""
    routers = space.job.model.layout.routers.values()
    for degrees in space.meshes(sorted({router.experts for router in routers})):
        for local in space.local_batches(degrees):
            values = {**degrees, GLOBAL_BATCH: space.global_batch, LOCAL_BATCH: local}
            found = space.variants(space.assumed(degrees, local), values)
            yield [one for one in found if isinstance(one, Candidate)]


class Comparison:
    """The candidates of a plan, in this process, which must not have imported torch."""

    def __init__(self, recipe: str, gpus: int, settings: Sequence[Override]) -> None:
        stub_libraries.load()
        from titan_core.loop.training import train
        from titan_simulate.estimate.estimate import device_of, estimate
        from titan_simulate.plan.composer import Composer

        components = Components.from_installed()

        def job_on(ranks: int, more: Sequence[Override]) -> AssembledJob:
            given = {one.key: one for one in (*settings, *more)}
            config, registry = load_config(recipe, list(given.values()), components)
            return assemble(config, registry, ranks, missing_ok=True)

        def estimated(overrides: Sequence[Override]) -> Estimate:
            return estimate(lambda more: job_on(gpus, [*overrides, *more]), train, self.machine)

        forks.load()
        self.machine, self.estimated = read_machine("h100"), estimated
        self.job_of = partial(job_on, gpus)
        job = job_on(gpus, ())
        self.space = Space(job, gpus, job.batch.global_size, {one.key for one in settings}, changes_numbers=False)

        def take(jobs: Sequence[SmallJob], meanwhile: Callable[[], None]) -> Sequence[Taken]:
            meanwhile()
            return take_all(job_on, train, device_of(self.machine), jobs)

        self.composer = Composer(self.space, self.machine, take)

    def of(self, one: Candidate) -> tuple[Composition, Estimate]:
        """Return a candidate composed, and its estimate.

        Raises:
            RuntimeError: its blocks cannot be traced.
        """
        self.composer.trace({one.kind: one.mesh})
        if (why := self.composer.failure(one.kind)) is not None:
            raise RuntimeError(str(why))
        return self.composer.composition(one), self.estimated(one.overrides)


def compared(recipe: str, gpus: int, values: Mapping[str, object]) -> tuple[float, float]:
    """Return composed time and memory, relative to the estimate, of the first candidate that has ``values``; degrees that
    they do not name are 1."""
    comparison = Comparison(recipe, gpus, [])
    for group in candidates(comparison.space):
        for one in group:
            rest = (key for key in comparison.space.job.mesh.degree_keys if key not in values)
            if all(one.values[key] == value for key, value in values.items()) and all(one.values[key] == 1 for key in rest):
                composed, found = comparison.of(one)
                return composed.step_seconds / found.step_seconds, composed.peak_gib / found.peak_gib
    raise RuntimeError("no candidate has these values")


def main() -> None:
    """Compare, and print a line per job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("gpus", type=int)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", action="store_true", help="estimate all candidates, and compare the best with the plan's")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    settings = [Override(*one.split("=", 1)) for one in options.settings]
    comparison = Comparison(options.recipe, options.gpus, settings)
    space, machine, composer = comparison.space, comparison.machine, comparison.composer
    from titan_simulate.plan.result import describe
    from titan_simulate.plan.search import Search

    groups = [group for group in candidates(space) if group]
    if options.every:
        chosen = [one for group in groups for one in group]
    else:
        draw = random.Random(options.seed)
        chosen = [draw.choice(draw.choice(groups)) for _ in range(options.jobs)]
    times, memories, best = [], [], None
    for one in chosen:
        try:
            composed, found = comparison.of(one)
        except (RuntimeError, UserError) as error:
            print(f"not compared: {describe(one)}: {error}")
            continue
        times.append(composed.step_seconds / found.step_seconds)
        memories.append(composed.peak_gib / found.peak_gib)
        if found.peak_gib <= machine.memory_gib and (best is None or found.step_seconds < best[0]):
            best = found.step_seconds, one
        figures = f"time {times[-1]:.3f}, memory {memories[-1]:.3f} of {found.step_seconds:.4g} s, {found.peak_gib:.1f} GiB"
        print(f"{figures}: {describe(one)}", flush=True)
    for what, ratios in (("time", times), ("memory", memories)):
        errors = sorted(abs(ratio - 1) for ratio in ratios)
        print(f"{what}: median error {statistics.median(errors):.1%}, 90% below {errors[int(0.9 * len(errors))]:.1%}")
    if options.every and best is not None:
        plan = Search(space, composer, machine, comparison.job_of).run(comparison.estimated, 6)
        assert plan.winner is not None
        slower = plan.winner.figures.step_seconds / best[0] - 1
        print(f"{len(chosen)} candidates; the plan's best is {slower:.1%} slower than the best of all: {describe(best[1])}")


if __name__ == "__main__":
    sys.exit(main())
