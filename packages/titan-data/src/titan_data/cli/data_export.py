"""``titan data export``: writes a tokenised dataset in the format of another trainer."""

from __future__ import annotations

import argparse
from pathlib import Path

from titan_core.api import CommandContext
from titan_core.toolkit.arguments import json_argument
from titan_core.toolkit.text import print_json, say


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan data export``."""
    parser.add_argument("folder", metavar="FOLDER", help="a dataset that `titan data tokenize` wrote")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="path of the two files without .bin and .idx")
    parser.add_argument(
        "--format", choices=("megatron",), default="megatron", help="Megatron-LM's indexed dataset (default: megatron)"
    )
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Write the files, and print how to name them."""
    arguments = context.arguments
    from titan_data.foreign.export import export_megatron

    prefix = Path(arguments.output).expanduser()
    documents, tokens = export_megatron(Path(arguments.folder).expanduser(), prefix)
    if arguments.json:
        print_json({"prefix": str(prefix), "documents": documents, "tokens": tokens})
        return 0
    say(f"{documents:,} documents, {tokens:,} tokens in {prefix}.bin and {prefix}.idx")
    say(f"Megatron-LM: --data-path {prefix}")
    return 0
