"""The fast checks of a component: what ``titan plugin check`` runs, and the suites too.

A check is a function that returns what it found in a few words, or raises: :class:`~titan_core.api.UserError` or
:class:`AssertionError` with what is wrong, :class:`NotTried` with what it needs.
"""

from titan_core.api import UserError
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.plugins.registry import Components


class NotTried(Exception):
    """A check needs something that was not named; the message says what."""


def model_error(job: AssembledJob, why: str, fix: str) -> UserError:
    """Return an error about the job's model that names its plugin."""
    assert isinstance(job.registry, Components)
    return UserError.one(str(job.registry.origin(job.family)), why, fix)
