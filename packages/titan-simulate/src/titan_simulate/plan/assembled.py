"""Assembles jobs of a plan to see whether they are valid: the checks of transforms find most mistakes before, but not those
that the core and the model find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan_core.api import UserError
from titan_core.api.config.resolved import Override
from titan_simulate.plan.candidates import Candidate, JobOf, Refused, refusal
from titan_simulate.plan.kinds import LOCAL_BATCH, Kind, text_of


class Assembled:
    """Assembles one job of each mesh, and one or two of each kind of blocks, when it is asked for them."""

    def __init__(self, job_of: JobOf) -> None:
        self._job_of = job_of
        self._meshes: dict[str, bool] = {}
        self._kinds: dict[tuple[object, ...], bool] = {}
        self.refused: list[Refused] = []
        """Why some cannot be assembled."""
        self.suspects: set[tuple[str, int]] = set()
        """Degrees with which some kinds cannot."""

    def is_refused(self, one: Candidate) -> bool:
        """Whether it is known that no job on the mesh of a candidate can be assembled."""
        return not self._meshes.get(str(one.mesh), True)

    def accepts(self, one: Candidate) -> bool:
        """Whether a job on the mesh of a candidate can be assembled."""
        mesh = str(one.mesh)
        if mesh not in self._meshes:
            problem = self._problem(one.overrides, mesh)
            self._meshes[mesh] = problem is None
            self.refused += [] if problem is None else [problem]
        return self._meshes[mesh]

    def accepts_kind(self, kind: Kind, jobs: Sequence[tuple[Mapping[str, int], int]], mesh: str) -> bool:
        """Whether jobs with blocks of ``kind`` can be assembled: not if checks reject its own degrees in the first and the
        last of ``jobs``. Another reason, such as the batch, is that of one mesh.

        Args:
            jobs: degrees and local batches of jobs that have it.
            mesh: of one of them, in words.
        """
        if kind.where not in self._kinds:
            problem = None
            for degrees, local in (jobs[0], jobs[-1]):
                values = {**degrees, LOCAL_BATCH: local}
                problem = self._problem([Override(key, text_of(value)) for key, value in values.items()], mesh)
                if problem is None or problem.key not in dict(kind.degrees):
                    problem = None
                    break
            self._kinds[kind.where] = problem is None
            if problem is not None:
                self.refused.append(problem)
                self.suspects |= {degree for degree in kind.degrees if degree[0] == problem.key}
        return self._kinds[kind.where]

    def _problem(self, overrides: Sequence[Override], mesh: str) -> Refused | None:
        try:
            self._job_of(overrides)
        except UserError as error:
            return refusal(error.problems[0], mesh)
        return None
