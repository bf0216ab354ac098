"""How a rank's part of a job ended: its log with the traceback, and a file for the launcher, which reports for all ranks."""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

from titan_core.api.errors import PluginFailure, RunStopped, UserError
from titan_core.api.events import RunStart, StepReport, TrainEnd
from titan_core.api.hookspecs import hookimpl
from titan_core.api.launcher import OUTCOMES, Outcome, report_lines
from titan_core.api.runs.files import LOGS
from titan_core.api.tools.consequences import follows_from_a_peer
from titan_core.api.tools.secrets import text_without_secrets

log = logging.getLogger(__name__)


class OutcomeRecorder:
    """An observer that knows how its rank's run ends. An error is recorded when it is raised: before this rank closes its
    connections, on which the others fail and the launcher ends this process."""

    def __init__(self, rank: int, dump_folder: str, keeps_log: bool = True) -> None:
        """
        Args:
            keeps_log: whether tracebacks go to a file, and not to standard error.
        """
        self._dump_folder, self._keeps_log = dump_folder, keeps_log
        self._recorded: BaseException | None = None
        self._checkpoint = (0, "")
        self.outcome = Outcome(rank)

    @hookimpl
    def titan_train_start(self, run: RunStart) -> None:
        """Where the run begins."""
        self.outcome = replace(self.outcome, step=run.step, begun=run.step)

    @hookimpl(tryfirst=True)
    def titan_step_start(self, step: int) -> None:
        """How far it has come."""
        self.outcome = replace(self.outcome, step=step)

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Likewise; steps may be reported by others than the trainer."""
        self.outcome = replace(self.outcome, step=report.step)

    @hookimpl
    def titan_checkpoint_saved(self, step: int, path: str) -> None:
        """What a run can be resumed from."""
        self._checkpoint = (step, path)

    @hookimpl(tryfirst=True)
    def titan_exception(self, error: BaseException) -> None:
        """The run is about to end by ``error``."""
        self.failed(error)

    @hookimpl
    def titan_train_end(self, end: TrainEnd) -> None:
        """The run is over."""
        if end.failed:
            return
        step, path = self._checkpoint
        checkpoint = path if step == end.step else ""
        self.outcome = replace(
            self.outcome, step=end.step, interrupted=end.interrupted, checkpoint=checkpoint, time=time.time()
        )
        if end.interrupted:
            self._leave()

    def failed(self, error: BaseException) -> None:
        """Record ``error``, once: its traceback in the rank's log, and its message for the launcher."""
        if error is self._recorded or isinstance(error, KeyboardInterrupt):
            return
        self._recorded = error
        if isinstance(error, UserError | RunStopped):
            # These say all in their message.
            texts = list(map(str, error.problems)) if isinstance(error, UserError) else [f"stopped: {error}"]
            # But a plugin's author wants to know where.
            written = self._write_log(error) if isinstance(error, PluginFailure) and self._keeps_log else ""
        else:
            texts = [f"{type(error).__name__}: {error}".partition("\n")[0]]
            written = self._write_log(error) if self._keeps_log else ""
        self.outcome = replace(
            self.outcome,
            problems=tuple(text_without_secrets(text) for text in texts),
            follows=follows_from_a_peer(error),
            log=written,
            time=time.time(),
        )
        self._leave()

    def _write_log(self, error: BaseException) -> str:
        """Append the traceback to the rank's log; its path, or nothing where that failed and standard error has it."""
        path = Path(self._dump_folder) / LOGS / f"rank-{self.outcome.rank}.log"
        when = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds")
        text = text_without_secrets("".join(traceback.format_exception(error)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                place = f"process {os.getpid()} on {socket.gethostname()}"
                file.write(f"{when}, step {self.outcome.step}, {place}\n{text}\n")
        except OSError as problem:
            print(f"titan: {path} cannot be written: {problem.strerror or problem}\n{text}", end="", file=sys.stderr)
            return ""
        return str(path)

    def _leave(self) -> None:
        """Leave the outcome where Titan's launcher looks for it."""
        folder = os.environ.get(OUTCOMES)
        if folder is None:
            return
        try:
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
                json.dump(asdict(self.outcome), file)
            os.replace(file.name, Path(folder) / f"rank-{self.outcome.rank}.json")
        except OSError as problem:
            log.error("the launcher cannot learn how this rank ended: %s", problem)
            self.print()

    def print(self) -> None:
        """Print the problems, for a launcher that does not: one line each."""
        for line in report_lines([self.outcome]):
            print(f"titan: {line}", file=sys.stderr)
