"""TensorBoard event files."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from titan_core.api import LoggerContext, Record
from titan_core.toolkit.runs.files import CONFIG
from titan_report.config import TensorBoardKeys


class TensorBoardLog:
    """Writes each metric as a scalar. A resumed run discards the scalars that were logged after its checkpoint."""

    def __init__(self, folder: Path, config: str, resumed_after: int) -> None:
        # TensorBoard ignores the scalars of older files from ``purge_step`` on.
        self._writer = SummaryWriter(folder, purge_step=resumed_after + 1 if resumed_after else None)
        self._writer.add_text("config", f"```toml\n{config}\n```", resumed_after)

    def log(self, record: Record) -> None:
        """Write the metrics of a step."""
        step, at = record["step"], record.get("time")
        assert step is not None
        for name, value in record.items():
            if name not in ("step", "time") and value is not None:
                self._writer.add_scalar(name, value, int(step), walltime=at)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def build(context: LoggerContext[TensorBoardKeys]) -> TensorBoardLog:
    """Open the log below the run directory."""
    run = Path(context.run.dump_folder)
    folder = run / context.section.save_tb_folder
    return TensorBoardLog(folder, (run / CONFIG).read_text(encoding="utf-8"), context.run.step)
