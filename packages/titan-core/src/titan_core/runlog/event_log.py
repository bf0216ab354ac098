"""``events.jsonl``: the events of all attempts of a run. Unlike metrics, events are never removed on resume."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from titan_core.api import Finding, Run, RunEnd, World, hookimpl
from titan_core.api._secrets import redact_text
from titan_core.api.observe.events import Sample
from titan_core.runlog.other_runs import recipe_of
from titan_core.toolkit.json_lines import LineFile
from titan_core.toolkit.processes import pid_namespace
from titan_core.toolkit.runs.files import EVENTS


class EventLog:
    """Writes the events of rank 0. An event is ``{"event": kind, "time": seconds since the epoch, "step": n, ...}``; its
    kind is

    * ``start``: ``steps``, ``world_size``, ``mesh`` (dimension -> degree), ``model`` (name and flavor), ``parameters`` and
      ``non_embedding_parameters`` (:class:`~titan_core.api.observe.events.ModelSize`), ``active_parameters`` (as the model
      declares them, or ``None``), ``recipe``
      (:func:`~titan_core.runlog.other_runs.recipe_of`), ``processes`` (by rank: ``host``, ``pid`` and ``pid_namespace``,
      :func:`~titan_core.toolkit.processes.pid_namespace`), and ``stage``, its name, if the run has several;
    * ``branch``: ``parent``, the directory of the run that this one continues after ``step``, relative to this one's; before
      all others, and written by the command that branches;
    * ``checkpoint``: ``path``;
    * ``sample``: ``prompt``, ``text`` (:class:`~titan_core.api.observe.events.Sample`);
    * ``finding``: ``kind``, ``message`` (:class:`~titan_core.api.Finding`);
    * ``end``: ``completed``, ``failed``, ``preempted``, ``interrupted``, ``data_ended``, ``reason``, and ``error``, one
      line, if it failed.

    An attempt without ``end`` is still running or was killed.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self._world = world
        process = {"host": socket.gethostname(), "pid": os.getpid(), "pid_namespace": pid_namespace()}
        self._processes = world.gather(process)
        self._file = LineFile(folder / EVENTS) if world.rank == 0 else None

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
            **({"stage": run.job.stages[run.job.stage].name} if run.job.stages else {}),
        )

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
        """Log the end of the attempt."""
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
