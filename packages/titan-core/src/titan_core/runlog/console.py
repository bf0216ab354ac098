"""The console logger: one line per logged step and, on a terminal, a progress bar below them."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from titan_core.api.dataset import StreamSpec
from titan_core.api.events import StepReport, TrainEnd
from titan_core.api.hookspecs import hookimpl
from titan_core.api.metric_log import LoggerContext, Record, format_mfu, is_estimated
from titan_core.api.tools.shown import describe_model, show_count


class ConsoleLog:
    """Prints to stdout; on a terminal, a progress bar stays below the lines."""

    def __init__(self, context: LoggerContext[None], console: Console | None = None) -> None:
        self._run = context.run
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        for line in describe_run(context):
            self._console.print(line, markup=False)
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
                redirect_stdout=False,
                redirect_stderr=True,
            )
            self._bar = self._progress.add_task(
                f"{context.run.job.name} ({show_count(context.run.size.parameters)})",
                total=context.run.steps,
                completed=context.run.step,
                loss="-",
            )
            self._progress.start()

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Advance the bar. Its loss is that of the last logged step, because reading a loss waits for the device."""
        if self._progress is not None:
            self._progress.update(self._bar, completed=report.step)

    def log(self, record: Record) -> None:
        """Print the line of a step."""
        self._console.print(format_line(record, self._run.steps), markup=False)
        if self._progress is not None and "loss" in record:
            self._progress.update(self._bar, loss=_figure(record["loss"], ".3f"))

    @hookimpl
    def titan_train_end(self, end: TrainEnd) -> None:
        """Print how the run ended and where its files are."""
        self.close()
        if end.completed:
            ending = f"done: {end.step} steps"
        else:
            ending = f"ended after step {end.step} of {self._run.steps}: {end.reason}"
        self._console.print(f"{ending}; config, plugins and metrics are in {self._run.dump_folder}", markup=False)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            sys.stdout.flush()


def describe_run(context: LoggerContext[None]) -> list[str]:
    """Return a summary of the run, one line per subject."""
    run = context.run
    job, batch = run.job, run.job.facts.batch
    transforms = ", ".join(transform.name for transform in job.transforms) or "none"
    lines = [
        f"model      {describe_model(job.name, run.size.parameters)}, exactly {run.size.parameters:,}; "
        f"{run.size.non_embedding:,} without the embedding",
        f"mesh       {job.facts.mesh} ({context.device_name}); transforms: {transforms}",
        f"batch      {batch.global_size} sequences of {batch.seq_len} tokens "
        f"= {batch.ranks} x {batch.microbatches} x {batch.local_size} (ranks x microbatches x local batch)",
        f"data       {_datasets(job.data)}, tokenizer {job.tokenizer.name}",
        f"run        {run.dump_folder}",
    ]
    if run.step:
        lines.append(f"resumed    after step {run.step}")
    return lines


def format_line(record: Record, steps: int) -> str:
    """Return the figures of a step in one line."""
    step = f"step {record['step']:>{len(str(steps))}}/{steps}"
    if "validation_loss" in record:
        figures = f"{record['validation_tokens']:,} tokens in {_figure(record['validation_seconds'], '.1f')} s"
        return f"{step} | validation loss {_figure(record['validation_loss'], '7.4f')} | {figures}"
    return " | ".join(
        [
            step,
            f"loss {_figure(record['loss'], '7.4f')}",
            f"grad norm {_figure(record['grad_norm'], '7.3f')}",
            f"lr {_figure(record['lr'], '.2e')}",
            f"{_figure(record['tokens_per_second'], ',.0f')} tokens/s",
            *([f"mfu {_mfu(record)}"] if "mfu" in record else []),
            f"memory {_figure(record['memory_peak_gib'], '.2f')} GiB",
        ]
    )


def _datasets(spec: StreamSpec) -> str:
    """Return the names of the datasets, with their shares in a mixture."""
    if len(spec.datasets) == 1:
        return spec.datasets[0].name
    total = sum(dataset.weight for dataset in spec.datasets)
    return ", ".join(f"{dataset.name} {dataset.weight / total:.3g}" for dataset in spec.datasets)


def _mfu(record: Record) -> str:
    mfu = record["mfu"]
    return "nan" if mfu is None else format_mfu(mfu, is_estimated([record]))


def _figure(value: float | int | None, form: str) -> str:
    return "nan" if value is None else format(value, form)
