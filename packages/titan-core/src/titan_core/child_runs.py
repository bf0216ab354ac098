"""Training a recipe in processes of its own, for commands that compare runs. Imports no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_core.config.overrides import Override
from titan_core.errors import UserError
from titan_core.job.job import Job


def without_checkpoints(job: Job) -> list[Override]:
    """What keeps a run of ``job`` from saving checkpoints, and from going on from those of an earlier one."""
    section = job.checkpoint.config if job.checkpoint is not None else None
    return (
        [Override(f"{section.section}.enable", "false")] if section is not None and "enable" in section.model_fields else []
    )


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
        """Train, and wait for the end.

        Raises:
            UserError: it failed; with the last line that says why.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "titan_core", "train", self.recipe]
        if self.processes > 1:
            command += ["--nproc-per-node", str(self.processes)]
        for override in (*self.overrides, Override("job.dump_folder", str(self.folder))):
            command.append(f"--{override.key}={override.text}")
        with self.log.open("w", encoding="utf-8") as log:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        if status:
            raise UserError.one(
                f"run {str(self.folder)!r}", f"it failed: {self._reason(status)}", f"all of it is in {self.log}"
            )

    def _reason(self, status: int) -> str:
        lines = [
            line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
        told = [
            line for line in lines if (line.startswith("titan: ") and "error" in line) or line.startswith("titan: stopped")
        ]
        return (told or lines or [f"status {status}"])[-1].removeprefix("titan: ").removeprefix("error: ")
