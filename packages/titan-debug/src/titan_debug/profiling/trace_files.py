"""Finds the trace files for a path."""

from __future__ import annotations

import re
from pathlib import Path

from titan_core.api import UserError
from titan_core.toolkit.runs.files import CONFIG
from titan_core.toolkit.runs.run_log import RunLog
from titan_debug.config import ProfilingSection

_STEP = re.compile(r"step-(\d+)")
_FILE = re.compile(r"[^.].*\.json(\.gz)?")
_DEFAULT: str = ProfilingSection.model_fields["save_traces_folder"].default


def trace_files(path: Path) -> list[Path]:
    """Return the traces for ``path``, sorted by rank. ``path`` may be a trace, a folder of traces, or a run's directory or
    its folder of traces. The last two stand for the last step with traces.

    Raises:
        UserError: there are no traces.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError.one(str(path), "no such file or folder", "pass a trace, a folder of traces, or a run's directory")
    if (path / CONFIG).exists():
        return _newest(RunLog.read_folder(path, "profiling.save_traces_folder", _DEFAULT), f"run {str(path)!r}")
    return _in_folder(path) or _newest(path, str(path))


def _newest(folder: Path, where: str) -> list[Path]:
    steps = sorted(
        (step for step in folder.glob("step-*") if _STEP.fullmatch(step.name)),
        key=lambda step: _number(step.name),
        reverse=True,
    )
    for step in steps:
        files = _in_folder(step)
        if files:
            return files
    fix = "train with --profiling.enable_profiling true, or send SIGUSR2 to a running rank's process"
    raise UserError.one(where, f"no traces in {folder}", fix)


def _in_folder(folder: Path) -> list[Path]:
    """Return the traces in ``folder``. Omits hidden files, which are incomplete."""
    files = (file for file in folder.iterdir() if file.is_file() and _FILE.fullmatch(file.name))
    return sorted(files, key=lambda file: (_number(file.name), file.name))


def _number(name: str) -> int:
    found = re.search(r"\d+", name)
    return int(found[0]) if found else 0
