"""The outcome of a rank: its log with the traceback, and a file for the launcher, which reports for all ranks."""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

from titan_core.api import Run, RunEnd, RunStopped, StepReport, UserError, hookimpl
from titan_core.api.config.secrets import redact_text
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.errors import PluginFailure, caused_by_peer, exit_status
from titan_core.toolkit.launching import OUTCOMES, Outcome, rank_log, report_lines
from titan_core.toolkit.own_files import no_link
from titan_core.toolkit.text import say

log = logging.getLogger(__name__)


class OutcomeRecorder:
    """An observer that records the end of its rank's run. An error is recorded when it is raised, before this rank closes
    its connections: then the other ranks fail, and the launcher ends this process."""

    def __init__(self, rank: int, dump_folder: str, keeps_log: bool = True) -> None:
        """
        Args:
            keeps_log: whether tracebacks are written to a file rather than to standard error.
        """
        self._dump_folder, self._keeps_log = dump_folder, keeps_log
        self._recorded: BaseException | None = None
        self._checkpoint = (0, "")
        self.outcome = Outcome(rank)

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Record the first step."""
        self.outcome = replace(self.outcome, step=run.step, begun=run.step)

    @hookimpl(tryfirst=True)
    def titan_step_start(self, step: int) -> None:
        """Record the current step."""
        self.outcome = replace(self.outcome, step=step)

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Record the step; callers other than the trainer may report steps."""
        self.outcome = replace(self.outcome, step=report.step)

    @hookimpl
    def titan_checkpoint_saved(self, step: int, path: str) -> None:
        """Record the last checkpoint."""
        self._checkpoint = (step, path)

    @hookimpl(tryfirst=True)
    def titan_train_end(self, end: RunEnd) -> None:
        """Record the end of the run."""
        if end.error is not None:
            self.failed(end.error)
            return
        step, path = self._checkpoint
        checkpoint = path if step == end.step else ""
        self.outcome = replace(
            self.outcome, step=end.step, interrupted=end.interrupted, checkpoint=checkpoint, time=time.time()
        )
        if end.interrupted:
            self._write()

    def failed(self, error: BaseException) -> None:
        """Record ``error`` once: its traceback in the rank's log, and its message for the launcher."""
        if error is self._recorded or isinstance(error, KeyboardInterrupt):
            return
        self._recorded = error
        if isinstance(error, UserError | RunStopped):
            # Their messages are complete.
            texts = list(map(str, error.problems)) if isinstance(error, UserError) else [f"stopped: {error}"]
            # The author of a plugin needs the traceback too.
            written = self._write_log(error) if isinstance(error, PluginFailure) and self._keeps_log else ""
        else:
            texts = [f"{type(error).__name__}: {error}".partition("\n")[0]]
            written = self._write_log(error) if self._keeps_log else ""
        self.outcome = replace(
            self.outcome,
            problems=tuple(redact_text(text) for text in texts),
            follows=caused_by_peer(error),
            status=exit_status(error),
            checkpoint=self._checkpoint[1],
            log=written,
            time=time.time(),
        )
        self._write()

    def _write_log(self, error: BaseException) -> str:
        """Append the traceback to the rank's log and return its path; if that fails, print it and return ``""``."""
        path = rank_log(self._dump_folder, self.outcome.rank)
        when = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds")
        text = redact_text("".join(traceback.format_exception(error)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", opener=no_link) as file:
                process = f"process {os.getpid()} on {socket.gethostname()}"
                file.write(f"{when}, step {self.outcome.step}, {process}\n{text}\n")
        except OSError as failure:
            say(f"titan: {path} cannot be written: {failure.strerror or failure}\n{text}", end="", file=sys.stderr)
            return ""
        return str(path)

    def _write(self) -> None:
        """Write the outcome to the folder that Titan's launcher reads."""
        folder = os.environ.get(OUTCOMES)
        if folder is None:
            return
        try:
            with atomic_write(Path(folder) / f"rank-{self.outcome.rank}.json") as part:
                part.write_text(json.dumps(asdict(self.outcome)), encoding="utf-8")
        except OSError as failure:
            log.error("cannot write this rank's outcome for the launcher: %s", failure)
            self.print()

    def print(self) -> None:
        """Print the problems, one per line, for launchers that do not report outcomes."""
        for line in report_lines([self.outcome]):
            say(f"titan: {line}", file=sys.stderr)
