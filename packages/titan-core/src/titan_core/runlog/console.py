"""The console logger: one line per logged step, and the progress that the status line shows below them."""

from __future__ import annotations

import textwrap
from contextlib import ExitStack

from rich.console import Console
from rich.progress import Progress

from titan_core.api import Finding, JobContext, Record, Run, RunEnd, StepReport, hookimpl
from titan_core.api.config.sections import MetricsSection
from titan_core.api.data.dataset import StreamSpec
from titan_core.api.observe.events import Sample
from titan_core.toolkit.device import device_name
from titan_core.toolkit.output import closed_output
from titan_core.toolkit.status import StatusLine, shown_task
from titan_core.toolkit.text import describe_model, format_mfu, is_estimated, say, show_count


class ConsoleLog:
    """Prints to stdout. On a terminal, the status line stays below the lines, and lines are made to fit."""

    def __init__(self, context: JobContext[MetricsSection]) -> None:
        self._console = Console()
        self._width = self._console.width if self._console.is_interactive and self._console.file.isatty() else None
        self._run: Run | None = None
        self._open = ExitStack()
        self._reported: set[int] = set()

    @hookimpl(tryfirst=True)
    def titan_train_start(self, run: Run) -> None:
        """Describe the run, and show its progress."""
        self._run = run
        for line in describe_run(run):
            self._print(line if self._width is None else textwrap.fill(line, self._width, subsequent_indent=" " * 11))
        self._progress = Progress(auto_refresh=False, speed_estimate_period=60.0)  # the status line draws its task
        name = f"{run.job.name} ({show_count(run.size.parameters)})"
        self._task = self._progress.add_task(name, total=run.steps, completed=run.step, loss="-")
        # Of an application that calls the trainer; `titan train` has one.
        self._open.enter_context(StatusLine())
        self._open.enter_context(shown_task(self._progress.tasks[0]))

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Advance the bar. Its loss is that of the last logged step, because reading a loss waits for the device. If nobody
        can see it any more, say so once in the run's log."""
        self._progress.update(self._task, completed=report.step)
        assert self._run is not None
        for number, why in closed_output().items():
            if number not in self._reported:
                self._reported.add(number)
                self._run.report(Finding("console", f"{why}; training continues without it", report.step))

    @hookimpl
    def titan_metrics(self, record: Record) -> None:
        """Print the line of a step."""
        assert self._run is not None
        width = None if self._width is None else self._console.width
        self._print(format_line(record, self._run.steps, width))
        if "loss" in record:
            self._progress.update(self._task, loss=_figure(record["loss"], ".3f"))

    @hookimpl
    def titan_sample(self, sample: Sample) -> None:
        """Print a text that the model wrote."""
        self._print(f"sample after step {sample.step}, from {sample.prompt!r}:")
        for line in sample.text.split("\n"):
            self._print(f"  {line}")

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Print how the run ended and where its files are."""
        self._open.close()
        if self._run is None:  # the error is all that there is to say
            return
        where = f"after step {end.step}" if end.step else "before the first step"
        if end.completed and 0 < end.step == self._run.step:
            ending = f"nothing to train: all {end.step} steps were done before"
        elif end.completed:
            ending = f"done: {end.step} steps"
        elif end.failed:  # the error is reported after this line
            ending = f"stopped {where} of {self._run.steps}"
        else:
            ending = f"ended {where} of {self._run.steps}: {end.reason}"
        self._print(f"{ending}; config, plugins and metrics are in {self._run.dump_folder}")

    def _print(self, text: str) -> None:
        say(text, flush=True)


def describe_run(run: Run) -> list[str]:
    """Return a summary of the run, one line per subject."""
    job, batch = run.job, run.job.batch
    described = describe_model(job.name, run.size.parameters, job.model.num_active_params)
    transforms = ", ".join(transform.name for transform in job.transforms) or "none"
    lines = [
        f"model      {described}, exactly {run.size.parameters:,}; {run.size.non_embedding:,} without the embedding",
        f"mesh       {job.mesh} ({device_name(run.world.device)}); transforms: {transforms}",
        f"batch      {batch.global_size} sequences of {batch.seq_len} tokens "
        f"= {batch.ranks} x {batch.microbatches} x {batch.local_size} (ranks x microbatches x local batch)",
        f"data       {_datasets(job.data)}, tokenizer {job.tokenizer.name}",
        f"run        {run.dump_folder}",
    ]
    if run.step:
        lines.append(f"resumed    after step {run.step}")
    return lines


def format_line(record: Record, steps: int, width: int | None = None) -> str:
    """Return the figures of a step in one line, as many as fit into ``width`` columns."""
    step = f"step {record['step']:>{len(str(steps))}}/{steps}"
    prefix = "objective/"
    metrics = [f"{name[len(prefix) :]} {_figure(record[name], '.4g')}" for name in record if name.startswith(prefix)]
    for key in (key for key in record if key.startswith("validation_loss")):
        of = key.removeprefix("validation_loss")
        loss = f"validation loss {_figure(record[key], '7.4f')}{of and f' ({of[1:]})'}"
        time = f"{_figure(record[f'validation_seconds{of}'], '.1f')} s"
        long = [step, loss, *metrics, f"{record[f'validation_tokens{of}']:,} tokens in {time}"]
        return _fitted(long, [step, loss, *metrics, time], width)
    if "loss" not in record:  # logged apart from steps, such as the scores of a task
        names = [name for name in record if name not in ("step", "time") and not name.endswith("_stderr")]
        figures = [f"{name} {_figure(record[name], '.4g')}" for name in names]
        return _fitted([step, *figures], [step, *figures], width)
    loss, lr = f"loss {_figure(record['loss'], '7.4f')}", f"lr {_figure(record['lr'], '.2e')}"
    norm, speed = _figure(record["grad_norm"], "7.3f"), _figure(record["tokens_per_second"], ",.0f")
    mfu = [f"mfu {_mfu(record)}"] if "mfu" in record else []
    memory = f"{_figure(record['memory_peak_gib'], '.2f')} GiB"
    long = [step, loss, *metrics, f"grad norm {norm}", lr, f"{speed} tokens/s", *mfu, f"memory {memory}"]
    return _fitted(long, [step, loss, *metrics, f"{speed} tok/s", f"norm {norm.strip()}", lr, *mfu, memory], width)


def _fitted(long: list[str], short: list[str], width: int | None) -> str:
    """Return ``long``; if it does not fit into ``width``, ``short`` without the last figures that do not fit either."""
    line = " | ".join(long)
    if width is None or len(line) <= width:
        return line
    while len("  ".join(short)) > width and len(short) > 2:
        short.pop()
    return "  ".join(short)


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
