"""Assembled jobs, and what commands and the launcher say about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from titan_core.api import Job, Problem
from titan_core.api.config.secrets import redact_text
from titan_core.api.plugins.assembled_job import AssembledJob


def note_of(problem: Problem) -> str:
    """Return ``problem``, something that this machine lacks, as a note for a command that only looks at the job. Secrets are
    removed."""
    return redact_text(str(replace(problem, why=f"{problem.why} (needed where the job trains)")))


def tokens_before(job: Job, step: int) -> int:
    """Return the number of input tokens of all ranks in the first ``step`` steps, if :func:`knows_stages`."""
    return job.tokens_before(step) if isinstance(job, AssembledJob) else step * job.batch.tokens_per_step


def knows_stages(job: Job) -> bool:
    """Whether ``job`` knows when the stages of its run begin: not while it is assembled. The check of a learning-rate
    schedule is called again when it does."""
    return isinstance(job, AssembledJob) or not (job.config.stages or job.config.stage)


@dataclass(frozen=True)
class JobFact:
    """A line of `titan job show` from a plugin (hook ``titan_job_facts``)."""

    name: str
    """A word or two, unique among all facts."""
    text: str
    """One line."""
    value: Any
    """The same as plain values, for ``--json``."""
