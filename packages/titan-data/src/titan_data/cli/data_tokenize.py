"""``titan data tokenize``: writes a recipe's dataset to disk as token ids that can be memory-mapped."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from titan_core.api import CommandContext, UserError
from titan_core.toolkit.arguments import process_count, recipe_arguments, small_integer
from titan_core.toolkit.folder_lock import FolderLock
from titan_core.toolkit.text import say


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan data tokenize``."""
    recipe_arguments(parser)
    parser.add_argument("--output", required=True, metavar="FOLDER", help="output folder; resumes an unfinished one")
    parser.add_argument(
        "--workers",
        type=process_count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of worker processes of this machine (default: one per core)",
    )
    parser.add_argument(
        "--engine",
        choices=["local", "ray"],
        default="local",
        help="where to tokenise: on this machine (default), or on all CPUs of a running Ray cluster",
    )
    parser.add_argument(
        "--parts", type=small_integer, default=64, metavar="N", help="number of parts to write (default: 64)"
    )


def run(context: CommandContext) -> int:
    """Tokenise the training dataset. Each dataset of a mixture gets its own folder below ``--output``."""
    arguments = context.arguments
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from titan_data.engines import LocalEngine, RayEngine
    from titan_data.tokenize import tokenize
    from titan_data.tokenized import INDEX, read_index

    job = context.job()
    datasets = job.data.datasets
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("parts{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    engine = RayEngine() if arguments.engine == "ray" else LocalEngine(arguments.workers)
    folders = []
    lock = FolderLock.beside(Path(arguments.output).resolve(), f"--output {arguments.output}")
    with lock, Progress(*columns, console=Console(stderr=True)) as progress:
        for dataset in datasets:
            folder = Path(arguments.output) / dataset.name if len(datasets) > 1 else Path(arguments.output)
            if len(datasets) > 1 and (folder / INDEX).exists():
                index = read_index(folder)  # completed before an interruption
                if index.fingerprint != job.text_tokenizer.fingerprint():
                    why = "contains a complete dataset made with another tokenizer"
                    raise UserError.one(str(folder), why, "name another folder")
                folders.append((dataset.name, folder, sum(part.tokens for part in index.parts), 0))
                continue
            task = progress.add_task(dataset.name, total=None, note="")
            machines: dict[str, TaskID] = {}
            for done in tokenize(job.data, dataset, job.tokenizer.name, folder, arguments.parts, engine):
                progress.update(task, completed=done.parts, total=done.of, note=f", {done.tokens:,} tokens")
                for machine, parts in done.machines.items() if arguments.engine == "ray" else ():
                    if machine not in machines:
                        machines[machine] = progress.add_task(f"  {machine}", total=done.of, note="")
                    progress.update(machines[machine], completed=parts)
            folders.append((dataset.name, folder, done.tokens, done.corrupt))
    for name, folder, tokens, corrupt in folders:
        skipped = f"; skipped {corrupt} corrupt records" if corrupt else ""
        say(f"{name}: {tokens:,} tokens in {folder}{skipped}")
    if len(datasets) > 1:
        print('to train on them, set dataset = "tokenized" and dataset_path to its folder in each entry of data.mixture')
    else:
        print('to train on it, set training.dataset = "tokenized" and training.dataset_path to the folder')
    return 0
