"""A job's datasets, opened: what is wrong with them is found here, before any process group or model exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan_core.data.source import DocumentSource
from titan_core.job.job import Job


@dataclass(frozen=True)
class OpenedData:
    """In the order of the job's datasets."""

    training: Sequence[DocumentSource]
    validation: Sequence[DocumentSource] = ()

    @classmethod
    def of(cls, job: Job) -> OpenedData:
        """Open them all.

        Raises:
            UserError: one cannot be.
        """
        return cls(job.data.open_sources(), job.validation.open_sources() if job.validation is not None else ())
