"""``metrics.jsonl``: one JSON object per logged step."""

from __future__ import annotations

from pathlib import Path

from titan_core.api import LoggerContext, Record
from titan_core.toolkit.json_lines import LineFile
from titan_core.toolkit.runs.files import METRICS


class MetricsFile:
    """Appends to the file, so that a resumed run continues it."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def log(self, record: Record) -> None:
        """Append a line."""
        self._file.append(record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def build(context: LoggerContext[None]) -> MetricsFile:
    """Build the logger for the file in the run's directory."""
    return MetricsFile(Path(context.run.dump_folder) / METRICS)
