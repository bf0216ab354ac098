"""``titan data tokenize``: a recipe's dataset as token ids on disk, ready to be memory-mapped."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from titan_core.api.command import CommandContext
from titan_core.api.errors import UserError
from titan_core.api.runs.folder_lock import FolderLock
from titan_core.api.tools.arguments import few, process_count, recipe_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan data tokenize``."""
    recipe_arguments(parser)
    parser.add_argument("--output", required=True, metavar="FOLDER", help="where to write; an unfinished one is resumed")
    parser.add_argument(
        "--workers", type=process_count, default=os.cpu_count() or 1, metavar="N", help="processes (default: cores)"
    )
    parser.add_argument("--parts", type=few, default=64, metavar="N", help="parts to divide it into (default: 64)")


def run(context: CommandContext) -> int:
    """Tokenize the training dataset; of a mixture, each into a folder of its own."""
    arguments = context.arguments
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from titan_core.api.tokenizer import fingerprint
    from titan_data.tokenize import tokenize
    from titan_data.tokenized import INDEX, read_index

    job = context.job()
    datasets = job.data.datasets
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("parts, {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    folders = []
    lock = FolderLock.beside(Path(arguments.output).resolve(), f"--output {arguments.output}")
    with lock, Progress(*columns, console=Console(stderr=True)) as progress:
        for dataset in datasets:
            folder = Path(arguments.output) / dataset.name if len(datasets) > 1 else Path(arguments.output)
            if len(datasets) > 1 and (folder / INDEX).exists():
                index = read_index(folder)  # done before an interruption
                if index.fingerprint != fingerprint(job.text_tokenizer):
                    raise UserError.one(str(folder), "is whole, and made with another tokenizer", "name another folder")
                folders.append((dataset.name, folder, sum(part.tokens for part in index.parts), 0))
                continue
            task = progress.add_task(dataset.name, total=None, tokens=0)
            made = tokenize(job.data, dataset, job.tokenizer.name, folder, arguments.parts, arguments.workers)
            for now in made:
                progress.update(task, completed=now.parts, total=now.of, tokens=now.tokens)
            folders.append((dataset.name, folder, now.tokens, now.corrupt))
    for name, folder, tokens, corrupt in folders:
        skipped = f", without {corrupt} corrupt records" if corrupt else ""
        print(f"{name}: {tokens:,} tokens in {folder}{skipped}")
    print('train on it with training.dataset = "tokenized" and training.dataset_path = that folder')
    return 0
