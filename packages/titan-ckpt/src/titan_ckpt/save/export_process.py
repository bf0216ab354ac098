"""A process that exports one checkpoint, beside the training that continues."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from titan_ckpt.format.folder import Folder
from titan_core.toolkit import launching
from titan_core.toolkit.processes import environment_of_child, python

_OF_RANKS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    launching.OUTCOMES, launching.RANK_LOGS, launching.LOCKED, launching.RESTART, launching.BEGAN, launching.COMMAND,
    launching.LISTENER, launching.JOB_KEY,
)  # fmt: skip
"""Environment variables by which a process would take itself for a rank."""
_LOWEST_PRIORITY = 19
_WARNING = "titan: warning: "


class ExportProcess:
    """Runs ``titan checkpoint convert``, which also pushes the export, with the lowest priority and one thread, on no GPU.
    The process ends with this one, and with the thread that starts it."""

    def __init__(self, step: int, checkpoint: Folder, target: Path, dtype: str, push: str | None) -> None:
        """Start the process.

        Args:
            step: step of the checkpoint.
            dtype: data type of the exported weights.
            push: repository on the hub to push the complete export to, if any.
        """
        self.step, self.checkpoint = step, checkpoint
        command = python("-m", "titan_core", "checkpoint", "convert", str(checkpoint), str(target))
        command += ["--to", "hf", "--dtype", dtype, *(() if push is None else ("--push", push))]
        own = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        own |= {**environment_of_child(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        # A session of its own: Ctrl-C stops the run after its step, and the export may end.
        self._process = subprocess.Popen(
            command,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._output,
            start_new_session=True,
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, _LOWEST_PRIORITY)

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    def wait(self, seconds: float | None) -> bool:
        """Wait for the process to end, for at most ``seconds`` (``None``: as long as it takes). Return whether it has."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> tuple[str, list[str]]:
        """Kill the process if it is running. Return why there is no export, or why it is not pushed (empty if neither), and
        the warnings that the process has printed."""
        if self.is_running:
            self._process.kill()
        status = self._process.wait()
        self._output.seek(0)
        with self._output:
            lines = self._output.read().decode(errors="replace").split("\n")
        lines = [line.strip() for line in lines if line.strip()]
        warnings = [line.removeprefix(_WARNING) for line in lines if line.startswith(_WARNING)]
        if status == 0:
            return "", warnings
        cause = lines[-1].removeprefix("titan: ").removeprefix("error: ") if lines else ""
        return cause or f"its process ended with status {status}", warnings
