"""``metrics.jsonl``: one JSON object per logged step."""

from __future__ import annotations

from pathlib import Path

from titan_core.api import JobContext, Record, Run, RunEnd, hookimpl
from titan_core.toolkit.json_lines import LineFile
from titan_core.toolkit.runs.files import METRICS


class MetricsFile:
    """Appends to the file in the run's directory, so that a resumed run continues it."""

    def __init__(self, context: JobContext[None]) -> None:
        self._file: LineFile | None = None

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Open the file."""
        self._file = LineFile(Path(run.dump_folder) / METRICS)

    @hookimpl
    def titan_metrics(self, record: Record) -> None:
        """Append a line."""
        assert self._file is not None
        self._file.append(record)

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
