"""``titan model download``: downloads the weights, config and tokenizer of a model on the Hugging Face hub."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from titan_core.api import CommandContext
from titan_core.toolkit.text import print_json, say
from titan_data.cli.tokenizer_download import repository_arguments
from titan_data.model_hub import DOWNLOADS


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan model download``."""
    repository_arguments(parser)
    parser.add_argument("--output", metavar="FOLDER", help=f"output folder (default: {DOWNLOADS}/OWNER/NAME)")


def run(context: CommandContext) -> int:
    """Download the model, and print the next commands."""
    arguments = context.arguments
    from titan_core.toolkit.folder_lock import FolderLock
    from titan_data.hub import MODEL_FILES, described, download, find_repository, model_files, summary

    repository = find_repository(arguments.repository, arguments.revision)
    files = model_files(repository)
    given = arguments.output or f"{DOWNLOADS}/{repository.name}"
    folder = Path(given).expanduser()
    with FolderLock.beside(folder.resolve(), f"--output {given}"):
        new = download(repository, folder, files, MODEL_FILES, arguments.force)
    next_command = f"titan generate {shlex.quote(str(folder))} --prompt 'Once upon a time'"
    if arguments.json:
        config = {"model.from_pretrained": str(folder)}
        print_json({**summary(repository, folder, files), "config": config, "generate": next_command})
        return 0
    say(described(repository, folder, files, new))
    say(f"\ngenerate:   {next_command}\nfine-tune:  in a recipe, set model.from_pretrained = {json.dumps(str(folder))}")
    say(f"recipe:     titan recipe copy --model {shlex.quote(str(folder))}")
    return 0
