"""``titan eval``. Imports torch only when a model is loaded."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

from titan_core.api import CommandContext, StoredModel, UserError
from titan_core.api.checkpoint.stored_model import LoadedModel
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import integer, json_argument
from titan_core.toolkit.launching import RankJob
from titan_core.toolkit.status import StatusLine, phase
from titan_core.toolkit.text import print_json, print_table, shorten
from titan_inference.cli import model_argument
from titan_inference.task_checks import LM_EVAL

_USUAL_SEQ_LEN = 2048
_MOST = 2**20


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan eval``."""
    model_argument(parser)
    parser.add_argument(
        "--dataset", metavar="NAME", help="measure the perplexity on this dataset (`titan plugins` lists them)"
    )
    parser.add_argument("--dataset-path", metavar="PATH", help="files of the dataset, or its name on the hub")
    parser.add_argument(
        "--batches", type=integer(1, _MOST), metavar="N", help="read only N batches of the dataset (default: all of it)"
    )
    parser.add_argument("--tasks", metavar="A,B", help="run tasks of EleutherAI's lm-eval (needs the package lm-eval)")
    parser.add_argument("--include-path", metavar="DIR", help="with --tasks: a folder with more tasks")
    parser.add_argument(
        "--num-fewshot", type=integer(0, 1000), metavar="N", help="with --tasks: examples before each question"
    )
    parser.add_argument(
        "--limit", type=integer(1, _MOST), metavar="N", help="with --tasks: questions per task (default: all)"
    )
    parser.add_argument("--batch-size", type=integer(1, 4096), default=8, metavar="N", help="default: %(default)s")
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Measure the model's perplexity on a dataset, its scores in tasks, or both."""
    settings = context.arguments
    stored = context.models.find(settings.model)
    _require_work(settings)
    assemble = partial(_job, context, stored)
    if settings.launcher is not None:
        status: int = settings.launcher.run.load()(context, RankJob(assemble, writes_run=False))
        return status
    job = assemble(int(os.environ.get("WORLD_SIZE", "1")))
    with context.models.open(job, stored) as loaded:
        answer: dict[str, Any] = {}
        # The line is removed before the answer is printed. Progress bars of lm-eval appear in it.
        with StatusLine() if loaded.world.rank == 0 else nullcontext():
            if settings.dataset is not None:
                answer |= _perplexity(context, loaded)
            if settings.tasks is not None:
                with phase("running the tasks"):
                    answer["tasks"] = _tasks(loaded, stored, settings)
        if loaded.world.rank == 0:
            if settings.json:
                print_json({"model": stored.path, **answer})
            else:
                _print(answer)
    return 0


def _require_work(settings: argparse.Namespace) -> None:
    """
    Raises:
        UserError: there is nothing to measure, or lm-eval is missing.
    """
    if settings.dataset is None and settings.dataset_path is not None:
        raise UserError.one("--dataset-path", "needs --dataset", "add --dataset json, for example")
    if settings.dataset is None and settings.tasks is None:
        raise UserError.one(
            "titan eval", "has nothing to measure", "add --dataset NAME (stdlib needs no file) or --tasks A,B"
        )
    if settings.tasks is None:
        for option in ("--include-path", "--num-fewshot", "--limit"):
            if getattr(settings, option.removeprefix("--").replace("-", "_")) is not None:
                raise UserError.one(option, "needs --tasks", "add --tasks A,B, or drop it")
    elif find_spec("lm_eval") is None:
        fix = f"install it: `uv pip install '{LM_EVAL}'`"
        raise UserError.one("--tasks", "needs the package lm-eval, which is not installed", fix)


def _job(context: CommandContext, stored: StoredModel, world_size: int | None = None) -> AssembledJob:
    """Return the job that evaluates: a dataset is its validation data."""
    settings = context.arguments
    validation: dict[str, Any] = {}
    if settings.dataset is not None:
        validation = {"enable": True, "dataset": settings.dataset}
        validation |= {"dataset_path": settings.dataset_path} if settings.dataset_path is not None else {}
        validation |= {"steps": settings.batches} if settings.batches is not None else {}

    def job(training: Mapping[str, Any]) -> AssembledJob:
        sections = {"training": {"local_batch_size": settings.batch_size, **training}, "validation": validation}
        return context.models.job(stored, world_size, sections)

    # Sequences as long as in training, unless that is unknown.
    if "seq_len" in stored.sections.get("training", {}):
        return job({})
    longest = context.models.job(stored, world_size).model.layout.max_seq_len
    return job({"seq_len": min(_USUAL_SEQ_LEN, longest)})


def _perplexity(context: CommandContext, loaded: LoadedModel) -> dict[str, Any]:
    from titan_inference.perplexity import measure

    found = measure(context.models, loaded)
    return {
        "dataset": context.arguments.dataset,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.tokens,
        "seconds": found.seconds,
    }


def _tasks(loaded: LoadedModel, stored: StoredModel, settings: argparse.Namespace) -> dict[str, Any]:
    """Return the metrics of each task; lm-eval returns them to the first rank of a machine only."""
    from lm_eval.evaluator import simple_evaluate

    from titan_inference.answers import AnswersOfStored
    from titan_inference.lm_eval_model import TitanLM
    from titan_inference.tasks import tasks_of

    answers = AnswersOfStored(loaded, stored.end_ids, settings.batch_size)
    if loaded.world.rank > 0:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names = [name.strip() for name in settings.tasks.split(",") if name.strip()]
    manager = tasks_of(names, settings.include_path, lambda name: f"--tasks {name}", "--include-path DIR")
    evaluate: Callable[..., Any] = simple_evaluate
    try:
        results = evaluate(
            model=TitanLM(answers, loaded.job.text_tokenizer, settings.batch_size),
            tasks=names,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            task_manager=manager,
            log_samples=False,
        )
    except OSError as error:  # also of libraries that download
        why = f"the data of the tasks cannot be read: {shorten(str(error).strip().splitlines()[0] if str(error) else '')}"
        fix = "check the network, or use tasks with local data (--include-path)"
        raise UserError.one(f"--tasks {settings.tasks}", why, fix) from error
    if results is None:
        return {}
    return {
        task: {metric: value for metric, value in metrics.items() if isinstance(value, int | float)}
        for task, metrics in results["results"].items()
    }


def _print(answer: Mapping[str, Any]) -> None:
    if "loss" in answer:
        bits = answer["bits_per_byte"]
        rows = [
            ("loss", f"{answer['loss']:.4f} nats per token"),
            ("perplexity", f"{answer['perplexity']:.4g}"),
            ("bits per byte", f"{bits:.4f}" if bits is not None else "unknown: the dataset holds token ids"),
            ("tokens", f"{answer['tokens']:,} in {answer['seconds']:.1f} s"),
        ]
        print_table(("dataset", answer["dataset"]), rows)
    if "tasks" in answer:
        scores = [
            (
                task,
                metric.removesuffix(",none").replace(",", " "),
                f"{value:.4f}" if isinstance(value, float) else str(value),
            )
            for task, metrics in answer["tasks"].items()
            for metric, value in metrics.items()
        ]
        print_table(("task", "metric", "value"), scores)
