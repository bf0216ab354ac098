"""Whether ``checkpoint.exclude_from_loading`` says something of what is loaded: a misspelt pattern would load all of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from titan_core.api.errors import Problem, UserError
from titan_core.api.job import Job
from titan_core.api.tools.patterns import matches

KEY = "checkpoint.exclude_from_loading"


def require_patterns_match(job: Job, patterns: Sequence[str], names: Iterable[str], place: str) -> None:
    """Each of ``patterns`` must match one of ``names``, which are in ``place`` or in the job.

    Raises:
        UserError: naming those that match none.
    """
    known = list(names)
    unmatched = [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in known)]
    if unmatched:
        example = f"names are such as {known[0]!r}" if known else "there is nothing to leave out"
        raise UserError(
            *(
                Problem(job.config.where(KEY, pattern), f"matches nothing of {place}, nor of this job", example)
                for pattern in unmatched
            )
        )
