"""``titan tokenizer download``: downloads the tokenizer of a repository on the Hugging Face hub."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from titan_core.api import CommandContext, Registry, Tokenizer, UserError
from titan_core.toolkit.arguments import json_argument
from titan_core.toolkit.files import LONGEST_TABLE, read_bytes
from titan_core.toolkit.text import print_json, say

DEFAULT_FOLDER = "assets/tokenizer"
"""Where the recipes of Llama expect its tokenizer."""
_LLAMA3_RANKS = 128_000


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan tokenizer download``."""
    repository_arguments(parser)
    parser.add_argument(
        "--output", default=DEFAULT_FOLDER, metavar="FOLDER", help=f"output folder (default: {DEFAULT_FOLDER})"
    )


def repository_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that both download commands share."""
    parser.add_argument("repository", metavar="REPO", help="a repository of the Hugging Face hub: OWNER/NAME")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: the main branch)")
    parser.add_argument(
        "--force", action="store_true", help="replace files of another tokenizer, model or revision in the output folder"
    )
    json_argument(parser)
    parser.epilog = (
        "HF_TOKEN is sent to the hub if it is set; gated and private repositories need it. HF_ENDPOINT selects a mirror.\n"
        "Run again after an interruption, the command keeps whole files. Each file is verified against the hub's hash."
    )


def run(context: CommandContext) -> int:
    """Download the tokenizer, and print the keys that select it."""
    arguments = context.arguments
    from titan_core.toolkit.folder_lock import FolderLock
    from titan_data.hub import TOKENIZER_FILES, described, download, find_repository, summary, tokenizer_files

    folder = Path(arguments.output).expanduser()
    repository = find_repository(arguments.repository, arguments.revision)
    files = tokenizer_files(repository)
    with FolderLock.beside(folder.resolve(), f"--output {arguments.output}"):
        new = download(repository, folder, files, TOKENIZER_FILES, arguments.force)
    keys = keys_for(folder, context.registry)
    if arguments.json:
        print_json({**summary(repository, folder, files), "config": {f"model.{key}": value for key, value in keys.items()}})
        return 0
    say(described(repository, folder, files, new))
    print_keys(keys)
    return 0


def keys_for(folder: Path, registry: Registry) -> dict[str, str]:
    """Return the keys of config section ``model`` that select the tokenizer in ``folder``.

    Raises:
        UserError: no installed tokenizer reads it.
    """
    ranks, json_file = folder / "tokenizer.model", folder / "tokenizer.json"
    llama3 = "llama3" in registry.names(Tokenizer) or not json_file.is_file()
    if llama3 and _num_ranks(ranks) == _LLAMA3_RANKS:
        return {"tokenizer": "llama3", "tokenizer_path": str(ranks)}
    if json_file.is_file():
        return {"tokenizer": "hf", "tokenizer_path": str(folder)}
    why = "is not a tokenizer that Titan reads (SentencePiece, for example)"
    fix = "choose a repository with a tokenizer.json, or convert the tokenizer with transformers"
    raise UserError.one(str(ranks), why, fix)


def print_keys(keys: Mapping[str, str]) -> None:
    """Print what to set in a recipe."""
    print("\nto use it, set in the recipe:\n\n[model]")
    for key, value in keys.items():
        say(f"{key} = {json.dumps(value, ensure_ascii=False)}")


def _num_ranks(file: Path) -> int | None:
    """Return the number of tokens in a file of tiktoken's ranks, ``None`` if it is another file or does not exist."""
    try:
        lines = read_bytes(file, longest=LONGEST_TABLE).split(b"\n")
    except OSError:
        return None
    fields = [line.split() for line in lines if line.strip()]
    return len(fields) if all(len(line) == 2 and line[1].isdigit() for line in fields) else None
