"""Trains recipes in child processes, for commands that compare runs. Imports no torch."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from titan_core.api import UserError
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.errors import EXIT_DATA_ENDED
from titan_core.toolkit.folder_lock import FolderLock
from titan_core.toolkit.processes import environment_of_child, python

PATIENCE_SECONDS = 60.0
"""Time that a child process has to terminate before it is killed, in seconds."""


def without_checkpoints(job: AssembledJob) -> list[Override]:
    """Return overrides that prevent ``job`` from saving checkpoints."""
    section = job.checkpoint.config if job.checkpoint is not None else None
    return (
        [Override(f"{section.section}.enable", "false")] if section is not None and "enable" in section.model_fields else []
    )


@dataclass(frozen=True)
class ChildRun:
    """A run in child processes."""

    recipe: str
    overrides: Sequence[Override]
    """If a key occurs twice, the later override applies."""
    processes: int
    """Number of ranks."""
    folder: Path
    """The run's directory. Its output goes to a file beside it, with ``.log`` appended to the name."""

    @property
    def log(self) -> Path:
        """The file for the run's output."""
        return self.folder.with_name(self.folder.name + ".log")

    def train(self) -> None:
        """Train, and wait for the run to end. An existing directory is first moved to ``previous`` beside it, because a run
        that resumes an earlier one could not be compared. If this process ends, the child ends too.

        Raises:
            UserError: the run failed, or another job is writing to the directory.
        """
        self._make_room()
        command = python("-m", "titan_core", "train", self.recipe)
        if self.processes > 1:
            command += ["--nproc-per-node", str(self.processes)]
        for override in (*self.overrides, Override("job.dump_folder", str(self.folder))):
            command.append(f"--{override.key}={override.text}")
        with self.log.open("w", encoding="utf-8") as log:
            environment = {**os.environ, **environment_of_child()}
            status = _wait_for(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        if status not in (0, EXIT_DATA_ENDED):
            raise UserError.one(f"run {str(self.folder)!r}", f"failed: {self._reason(status)}", f"see {self.log}")

    def _make_room(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if not self.folder.exists():
            return
        previous = self.folder.parent / "previous"
        previous.mkdir(exist_ok=True)
        number = next(number for number in itertools.count(1) if not (previous / f"{self.folder.name}.{number}").exists())
        with FolderLock(self.folder, f"run {str(self.folder)!r}"):  # do not move the directory of a running job
            self.folder.rename(previous / f"{self.folder.name}.{number}")

    def _reason(self, status: int) -> str:
        lines = [
            line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
        errors = [
            line for line in lines if (line.startswith("titan: ") and "error" in line) or line.startswith("titan: stopped")
        ]
        return (errors or lines or [f"exit status {status}"])[-1].removeprefix("titan: ").removeprefix("error: ")


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """Wait for ``child`` and return its exit status. If this process is ended, the child has ``PATIENCE_SECONDS`` to
    terminate: an interrupt reaches the child directly, and SIGTERM is forwarded."""

    def end(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, end) if in_main_thread else None
    try:
        return child.wait()
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            child.terminate()
        try:
            child.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
        raise
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)
