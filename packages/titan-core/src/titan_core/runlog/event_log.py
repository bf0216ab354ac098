"""``events.jsonl``: the events of all attempts of a run. Unlike metrics, events are never removed on resume."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from titan_core.api import Finding, Run, RunEnd, World, hookimpl
from titan_core.api.config.secrets import redact_text
from titan_core.api.observe.events import Sample
from titan_core.runlog.other_runs import recipe_of
from titan_core.runlog.time_by_cause import CAUSES, SpentTime
from titan_core.toolkit.json_lines import LineFile
from titan_core.toolkit.launching import Began
from titan_core.toolkit.processes import pid_namespace
from titan_core.toolkit.runs.files import CONFIG, EVENTS, digest_of


class EventLog:
    """Writes the events of rank 0. An event is ``{"event": kind, "time": seconds since the epoch, "step": n, ...}``; its
    kind is

    * ``start``: ``steps``, ``world_size``, ``mesh`` (dimension -> degree), ``model`` (name and flavor), ``parameters`` and
      ``non_embedding_parameters`` (:class:`~titan_core.api.observe.events.ModelSize`), ``active_parameters`` (as the model
      declares them, or ``None``), ``recipe``
      (:func:`~titan_core.runlog.other_runs.recipe_of`), ``processes`` (by rank: ``host``, ``pid`` and ``pid_namespace``,
      :func:`~titan_core.toolkit.processes.pid_namespace`),
      ``config`` (:func:`~titan_core.toolkit.runs.files.digest_of` the attempt's), ``began`` and ``launched`` (when the
      attempt did, and its launcher: :class:`~titan_core.toolkit.launching.Began`), and
      ``stage``, its name, if the run has several;
    * ``branch``: ``parent``, the directory of the run that this one continues after ``step``, relative to this one's; before
      all others, and written by the command that branches;
    * ``rewind``: to ``step``; ``documents``, the number of those that are passed over from there on; written by the command
      that rewinds;
    * ``spent``: ``seconds`` (by cause, the sum of all ranks since ``began``: :mod:`titan_core.runlog.time_by_cause`);
    * ``checkpoint``: ``path``;
    * ``sample``: ``prompt``, ``text`` (:class:`~titan_core.api.observe.events.Sample`);
    * ``finding``: ``kind``, ``message`` (:class:`~titan_core.api.Finding`);
    * ``end``: ``completed``, ``failed``, ``preempted``, ``interrupted``, ``data_ended``, ``reason``, and ``error``, one
      line, if it failed.

    An attempt without ``end`` is still running or was killed.
    """

    def __init__(self, folder: Path, world: World, spent: SpentTime) -> None:
        """
        Args:
            spent: the time of this rank, which begins with the first of all ranks.
        """
        self._world = world
        process = {"host": socket.gethostname(), "pid": os.getpid(), "pid_namespace": pid_namespace()}
        found = world.gather((process, spent.began))
        self._processes = [process for process, _ in found]
        spent.begin(Began(*(min(times) for times in zip(*(began for _, began in found), strict=True))))
        self._spent = spent
        self._own = self._sums = dict.fromkeys(CAUSES, 0.0)  # of this rank and of all, when they were last summed
        self._file = LineFile(folder / EVENTS) if world.rank == 0 else None
        config = folder / CONFIG
        self._config = digest_of(config) if self._file is not None and config.exists() else ""

    @hookimpl(tryfirst=True)
    def titan_train_start(self, run: Run) -> None:
        """Log the start of the attempt."""
        mesh = {name: degree for name, degree in self._world.plan.degrees.items() if degree > 1}
        self._write(
            "start",
            run.step,
            steps=run.steps,
            world_size=self._world.size,
            mesh=mesh,
            model=run.job.name,
            parameters=run.size.parameters,
            non_embedding_parameters=run.size.non_embedding,
            active_parameters=run.job.model.num_active_params,
            recipe=recipe_of(run.job),
            processes=self._processes,
            config=self._config,
            began=self._spent.began.attempt,
            launched=self._spent.began.launcher,
            **({"stage": run.job.stages[run.job.stage].name} if run.job.stages else {}),
        )

    def log_spent(self, step: int) -> None:
        """Log what the ranks have spent their time on. Every rank must call this."""
        self._own = self._spent.totals()
        sums = self._world.sum(torch.tensor([*self._own.values()], dtype=torch.float64)).tolist()
        self._sums = dict(zip(self._own, sums, strict=True))
        self._write_spent(step, self._sums)

    def _write_spent(self, step: int, seconds: Mapping[str, float]) -> None:
        self._write("spent", step, seconds={cause: round(each, 3) for cause, each in seconds.items()})

    @hookimpl
    def titan_checkpoint_saved(self, step: int, path: str) -> None:
        """Log a complete checkpoint."""
        self._write("checkpoint", step, path=redact_text(path))

    @hookimpl
    def titan_sample(self, sample: Sample) -> None:
        """Log a text that the model wrote."""
        self._write("sample", sample.step, prompt=sample.prompt, text=sample.text)

    @hookimpl
    def titan_finding(self, finding: Finding) -> None:
        """Log a finding of rank 0."""
        self._write("finding", finding.step, kind=finding.kind, message=redact_text(finding.message))

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Log the end of the attempt. Other ranks may be lost, so that rank 0 speaks for all since their last sum."""
        now, size = self._spent.totals(), self._world.size
        self._write_spent(end.step, {cause: self._sums[cause] + size * (now[cause] - self._own[cause]) for cause in now})
        more: dict[str, Any] = {}
        if end.error is not None:
            more["error"] = redact_text(f"{type(end.error).__name__}: {end.error}".partition("\n")[0])
        self._write(
            "end",
            end.step,
            completed=end.completed,
            failed=end.failed,
            preempted=end.preempted,
            interrupted=end.interrupted,
            data_ended=end.data_ended,
            reason=end.reason,
            **more,
        )

    def _write(self, event: str, step: int, **more: object) -> None:
        file = self._file
        if file is not None:
            file.append({"event": event, "time": time.time(), "step": step, **more})

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None  # an observer's thread may still report a finding
        if file is not None:
            file.close()
