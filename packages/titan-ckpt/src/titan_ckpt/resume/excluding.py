"""Checking that the patterns of ``checkpoint.exclude_from_loading`` match: a misspelt pattern would exclude nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from titan_core.api import Problem, UserError, matches
from titan_core.toolkit.jobs import AssembledJob

KEY = "checkpoint.exclude_from_loading"


def require_patterns_match(job: AssembledJob, patterns: Sequence[str], names: Iterable[str], place: str) -> None:
    """Require each of ``patterns`` to match one of ``names``, the names of tensors in ``place`` or in the job.

    Raises:
        UserError: a pattern matches nothing.
    """
    known = list(names)
    unmatched = [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in known)]
    if unmatched:
        fix = f"use names such as {known[0]!r}" if known else "remove the pattern: there are no tensors"
        raise UserError(
            *(
                Problem(job.config.where(KEY, pattern), f"matches nothing in {place} or in this job", fix)
                for pattern in unmatched
            )
        )
