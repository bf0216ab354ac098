"""Training a recipe in processes of its own, for commands that compare runs. Imports no torch."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from titan_core.api.config import Override
from titan_core.api.errors import UserError
from titan_core.api.job import Job
from titan_core.api.processes import environment_of_child
from titan_core.api.runs.folder_lock import FolderLock

PATIENCE_SECONDS = 60.0
"""How long a child that is to end has for it."""


def without_checkpoints(job: Job) -> list[Override]:
    """What keeps a run of ``job`` from saving checkpoints, which are not wanted."""
    section = job.checkpoint.config if job.checkpoint is not None else None
    return (
        [Override(f"{section.section}.enable", "false")] if section is not None and "enable" in section.model_fields else []
    )


def without_loggers(job: Job) -> list[Override]:
    """What switches off the metric loggers of ``job`` that can be: those whose section has a key ``enable_...``."""
    sections = [one.config for one in job.loggers if one.config is not None]
    return [
        Override(f"{section.section}.{key}", "false")
        for section in sections
        for key in section.model_fields
        if key.startswith("enable_")
    ]


@dataclass(frozen=True)
class ChildRun:
    """A run to be made."""

    recipe: str
    overrides: Sequence[Override]
    """Of two of a key the later one counts."""
    processes: int
    folder: Path
    """The run's directory. What it prints goes to a file of that name with ``.log`` at its end."""

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.folder.with_name(self.folder.name + ".log")

    def train(self) -> None:
        """Train, and wait for the end. What lies in the directory is moved to ``previous`` beside it first: a run that went
        on from an earlier one would compare with nothing. The child ends with this process.

        Raises:
            UserError: it failed, with the last line that says why; or another job is writing to the directory.
        """
        self._make_room()
        command = [sys.executable, "-m", "titan_core", "train", self.recipe]
        if self.processes > 1:
            command += ["--nproc-per-node", str(self.processes)]
        for override in (*self.overrides, Override("job.dump_folder", str(self.folder))):
            command.append(f"--{override.key}={override.text}")
        with self.log.open("w", encoding="utf-8") as log:
            environment = {**os.environ, **environment_of_child()}
            status = _wait_for(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        if status:
            why = f"it failed: {self._reason(status)}"
            raise UserError.one(f"run {str(self.folder)!r}", why, f"all of it is in {self.log}")

    def _make_room(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if not self.folder.exists():
            return
        previous = self.folder.parent / "previous"
        previous.mkdir(exist_ok=True)
        number = next(number for number in itertools.count(1) if not (previous / f"{self.folder.name}.{number}").exists())
        with FolderLock(self.folder, f"run {str(self.folder)!r}"):  # a job that writes there must not be moved
            self.folder.rename(previous / f"{self.folder.name}.{number}")

    def _reason(self, status: int) -> str:
        lines = [
            line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
        told = [
            line for line in lines if (line.startswith("titan: ") and "error" in line) or line.startswith("titan: stopped")
        ]
        return (told or lines or [f"status {status}"])[-1].removeprefix("titan: ").removeprefix("error: ")


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """The child's exit status. What ends this process ends the child too: an interrupt reaches it by itself, SIGTERM is
    passed on; either way it is given time to end well."""

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
