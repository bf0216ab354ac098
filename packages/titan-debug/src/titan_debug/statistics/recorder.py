"""Writes statistics of modules' outputs and of gradients, a file of JSON lines a rank."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn

from titan_core.hookspecs import hookimpl
from titan_core.job.job import JobFacts
from titan_core.metrics.json_lines import open_lines
from titan_core.train.events import PendingUpdate, RunStart
from titan_debug.attempt import begin_attempt
from titan_debug.config import NumericsSection
from titan_debug.replay import named_gradients, place_in_model, replay

log = logging.getLogger(__name__)


class StatisticsRecorder:
    """Each rank writes what it holds, without a word to the others; readers put it together (:mod:`.read`)."""

    def __init__(self, section: NumericsSection) -> None:
        self._freq, self._folder = section.statistics_freq, section.save_statistics_folder
        self._run: RunStart | None = None
        self._attempt = 0.0
        self._file: TextIO | None = None

    @hookimpl
    def titan_train_start(self, run: RunStart) -> None:
        """Remember the model's parts, and open the file."""
        self._run, self._attempt = run, begin_attempt(run)
        file = Path(run.dump_folder) / self._folder / f"rank-{run.world.rank}.jsonl"
        with self._going_on():
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_lines(file)

    @hookimpl
    def titan_before_update(self, update: PendingUpdate) -> None:
        """Write a line, where one is due. The gradients are those of the step itself, before they are clipped."""
        run = self._run
        assert run is not None
        if update.step % self._freq:
            return
        sums: defaultdict[str, list[Tensor]] = defaultdict(list)

        def look(name: str, module: nn.Module, outputs: list[Tensor]) -> None:
            sums[name] += [_moments(output) for output in outputs if output.numel()]

        replay(update, run.parts, look)
        outputs = {name: _together(tensors) for name, tensors in sums.items() if tensors}
        gradients = {name: _together([_moments(tensor)]) for name, tensor in named_gradients(run.parts) if tensor.numel()}
        places = {name: place_in_model(name, run.parts[0].layout) for name in (*outputs, *gradients)}
        record = {
            "step": update.step,
            "attempt": self._attempt,
            "places": places,
            "outputs": outputs,
            "gradients": gradients,
        }
        with self._going_on():
            if self._file is not None:
                self._file.write(json.dumps(record) + "\n")

    @hookimpl
    def titan_train_end(self) -> None:
        """Close the file."""
        with self._going_on():
            file, self._file = self._file, None
            if file is not None:
                file.close()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """A full disk is not worth a run: what cannot be written is told, and no more is written."""
        try:
            yield
        except OSError as error:
            self._file = None
            log.warning("statistics cannot be written: %s; none are kept from here on", error.strerror or error)


@torch.no_grad()
def _moments(tensor: Tensor) -> Tensor:
    """Count, sum, sum of squares, largest absolute value and elements that are not finite; fp64, on the tensor's device."""
    # Sums of squares in fp64: in bf16 they would be as wrong as what they are to find.
    return torch.stack(
        [
            torch.tensor(tensor.numel(), dtype=torch.float64, device=tensor.device),
            tensor.sum(dtype=torch.float64),
            torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2,
            tensor.abs().max().double(),
            (~torch.isfinite(tensor)).sum().double(),
        ]
    )


def _together(several: list[Tensor]) -> list[float | int | None]:
    """Over microbatches, for JSON, which has no NaN."""
    all_of = torch.stack(several).cpu()
    count, total, squares, _, bad = all_of.sum(0).tolist()
    figures = (total, squares, all_of[:, 3].max().item())
    return [int(count), *(one if abs(one) < float("inf") else None for one in figures), int(bad)]


def build(facts: JobFacts) -> StatisticsRecorder:
    """For ``numerics.statistics_freq``."""
    return StatisticsRecorder(facts.section(NumericsSection))
