"""Which files of traces a path means."""

from __future__ import annotations

import re
from pathlib import Path

from titan_core.api.errors import UserError
from titan_core.api.runs.files import CONFIG
from titan_debug.config import ProfilingSection
from titan_runs.run_log import RunLog

_STEP = re.compile(r"step-(\d+)")
_FILE = re.compile(r"[^.].*\.json(\.gz)?")
_DEFAULT: str = ProfilingSection.model_fields["save_traces_folder"].default


def trace_files(path: Path) -> list[Path]:
    """The traces that ``path`` means: a file; the files of a folder, by rank; of a run, or of its folder of traces, those of
    the last step that has any.

    Raises:
        UserError: there are none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError.one(
            str(path), "there is no such file or folder", "name a trace, a folder of them, or a run's directory"
        )
    if (path / CONFIG).exists():
        return _newest(RunLog.read_folder(path, "profiling.save_traces_folder", _DEFAULT), f"run {str(path)!r}")
    return _in_folder(path) or _newest(path, str(path))


def _newest(folder: Path, where: str) -> list[Path]:
    steps = sorted(
        (one for one in folder.glob("step-*") if _STEP.fullmatch(one.name)), key=lambda one: _number(one.name), reverse=True
    )
    for step in steps:
        files = _in_folder(step)
        if files:
            return files
    why = f"there are no traces in {folder}"
    raise UserError.one(where, why, "profile with --profiling.enable_profiling true, or send a running process SIGUSR2")


def _in_folder(folder: Path) -> list[Path]:
    """Hidden files are left out: they are not whole."""
    files = (one for one in folder.iterdir() if one.is_file() and _FILE.fullmatch(one.name))
    return sorted(files, key=lambda one: (_number(one.name), one.name))


def _number(name: str) -> int:
    found = re.search(r"\d+", name)
    return int(found[0]) if found else 0
