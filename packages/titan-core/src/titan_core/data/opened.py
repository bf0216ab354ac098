"""Opening of a job's datasets, which finds their mistakes before any process group or model exists."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from titan_core.api import DocumentSource
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.data.streams import open_sources

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedData:
    """The opened sources, in the order of the job's datasets."""

    training: Sequence[DocumentSource]
    validation: Sequence[DocumentSource] = ()

    @classmethod
    def of(cls, job: AssembledJob) -> OpenedData:
        """Open all datasets of ``job``.

        Raises:
            UserError: a dataset cannot be opened.
        """
        for line in job.text_tokenizer.describe_special_tokens():
            log.info("tokenizer %s: %s", job.tokenizer.name, line)
        return cls(open_sources(job.data), open_sources(job.validation) if job.validation is not None else ())
