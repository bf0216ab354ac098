"""TensorBoard event files."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from titan_core.api import JobContext, Record, Run, RunEnd, hookimpl
from titan_core.toolkit.files import read_text
from titan_core.toolkit.runs.files import CONFIG
from titan_report.config import TensorBoardKeys


class TensorBoardLog:
    """Writes each metric as a scalar. A resumed run discards the scalars that were logged after its checkpoint."""

    def __init__(self, context: JobContext[TensorBoardKeys]) -> None:
        self._folder = context.section.save_tb_folder
        self._writer: SummaryWriter | None = None

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Open an event file below the run directory."""
        folder = Path(run.dump_folder)
        # TensorBoard ignores the scalars of older files from ``purge_step`` on.
        self._writer = SummaryWriter(folder / self._folder, purge_step=run.step + 1 if run.step else None)
        config = read_text(folder / CONFIG)
        self._writer.add_text("config", f"```toml\n{config}\n```", run.step)

    @hookimpl
    def titan_metrics(self, record: Record) -> None:
        """Write the metrics of a step."""
        assert self._writer is not None
        step, at = record["step"], record.get("time")
        assert step is not None
        for name, value in record.items():
            if name not in ("step", "time") and value is not None:
                self._writer.add_scalar(name, value, int(step), walltime=at)

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
