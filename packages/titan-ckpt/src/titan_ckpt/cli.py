"""``titan checkpoint list | show | verify | rm``. Free of torch."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from titan_ckpt.catalogue import Entry, entries, entry, step_folder, steps_in
from titan_ckpt.folder import Folder
from titan_ckpt.manifest import verify_data
from titan_ckpt.retention import remove
from titan_ckpt.stored import NAME, BrokenCheckpoint, Manifest
from titan_core.api.command import CommandContext
from titan_core.api.errors import UserError
from titan_core.api.numbers import MOST_STEPS
from titan_core.api.tools.arguments import json_argument, whole
from titan_core.api.tools.output import print_json, print_table

EXIT_BROKEN = 1


def list_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan checkpoint list``."""
    _path_argument(parser)
    json_argument(parser)


def show_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan checkpoint show``."""
    _path_argument(parser)
    parser.add_argument(
        "--step", type=whole(0, MOST_STEPS), metavar="N", help="which one (default: the newest that is complete)"
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor too")
    json_argument(parser)


def verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan checkpoint verify``."""
    _path_argument(parser)
    parser.add_argument("--step", type=whole(0, MOST_STEPS), metavar="N", help="only this one (default: all)")
    json_argument(parser)


def rm_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan checkpoint rm``."""
    _path_argument(parser)
    parser.add_argument("--step", type=whole(0, MOST_STEPS), nargs="+", required=True, metavar="N", help="which ones")
    parser.add_argument("--force", action="store_true", help="even if no complete checkpoint would be left")


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan checkpoint convert``."""
    parser.add_argument(
        "source", metavar="SOURCE", help="a checkpoint of Titan's, or a folder of Hugging Face's or Meta's files"
    )
    parser.add_argument("target", metavar="TARGET", help="a new folder: for Hugging Face, or a checkpoint")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="type of the weights (default: as they are)"
    )
    parser.add_argument("--model", metavar="NAME", help="whose weights they are, where several plugins know them")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer files to put beside exported weights (default: the run's)"
    )


def list_checkpoints(context: CommandContext) -> int:
    """Print every checkpoint of a run, the newest first."""
    arguments = context.arguments
    found = checkpoints_at(arguments.path)
    if arguments.json:
        print_json([_describe(one) for one in found])
        return 0
    rows = [
        (
            str(one.step) if one.step >= 0 else "?",
            _mesh(one.manifest) if one.manifest else "?",
            _size(one.manifest.num_bytes) if one.manifest else "?",
            _age(one.manifest.created) if one.manifest else "?",
            _state(one),
        )
        for one in found
    ]
    print_table(("step", "mesh", "size", "age", f"state of {arguments.path}"), rows)
    return 0


def show(context: CommandContext) -> int:
    """Print what a checkpoint says of itself."""
    arguments = context.arguments
    one = pick(arguments.path, arguments.step)
    manifest = one.manifest
    assert manifest is not None
    if arguments.json:
        print_json({**_describe(one), "about": manifest.about, "tensors": {
            name: {"dtype": tensor.dtype, "shape": tensor.shape} for name, tensor in manifest.tensors.items()
        } if arguments.tensors else len(manifest.tensors)})  # fmt: skip
        return 0
    plugins = manifest.about.get("plugins", {})
    rows = [
        ("step", f"{manifest.step}"),
        ("model", str(manifest.about.get("model", "?"))),
        ("mesh", _mesh(manifest)),
        ("saved", f"{manifest.created} ({_age(manifest.created)} ago)"),
        ("size", f"{_size(manifest.num_bytes)} in {len(manifest.files)} file(s), {len(manifest.tensors)} tensors"),
        ("holds", "weights alone" if manifest.model_only else "all that a run needs to resume"),
        ("written by", ", ".join(f"{name} {version}" for name, version in plugins.items())),
        ("torch", str(manifest.about.get("torch", "?"))),
    ]
    if arguments.tensors:
        rows += [(name, f"{tensor.dtype} {list(tensor.shape)}") for name, tensor in manifest.tensors.items()]
    print_table(("", str(one.folder)), rows)
    return 0


def verify(context: CommandContext) -> int:
    """Hold every byte against its checksum; the status is 1 if a checkpoint is not whole."""
    arguments = context.arguments
    found = [pick(arguments.path, arguments.step)] if arguments.step is not None else checkpoints_at(arguments.path)
    verdicts = {}
    for one in found:
        problem = one.problem
        if one.manifest is not None:
            try:
                with progress(f"step {one.step}", one.manifest.num_bytes, arguments.json, of_bytes=True) as advance:
                    for num_bytes in verify_data(one.folder, one.manifest):
                        advance(num_bytes)
            except (BrokenCheckpoint, OSError) as error:
                problem = str(error)
        verdicts[one.step] = problem
        if not arguments.json:
            print(f"{f'step {one.step}' if one.step >= 0 else one.folder}: {problem or 'whole'}")
    if arguments.json:
        print_json([{"step": step, "whole": not problem, "problem": problem} for step, problem in verdicts.items()])
    return EXIT_BROKEN if any(verdicts.values()) else 0


def rm(context: CommandContext) -> int:
    """Remove checkpoints."""
    arguments = context.arguments
    folder = find_checkpoints(arguments.path)
    there = steps_in(folder)
    for step in arguments.step:
        if step not in there:
            raise UserError.one(str(folder), f"there is no step {step}", f"there is {', '.join(map(str, there))}")
    left = [one for one in entries(folder) if one.manifest is not None and one.step not in arguments.step]
    if not left and not arguments.force:
        raise UserError.one(str(folder), "no complete checkpoint would be left", "add --force if that is what you want")
    for step in dict.fromkeys(arguments.step):
        remove(folder, step)
        print(f"removed {step_folder(folder, step)}")
    return 0


def find_checkpoints(path: str) -> Folder:
    """The folder of checkpoints that ``path`` means: that folder, one of its checkpoints, or a run's directory.

    Raises:
        UserError: there are none.
    """
    folder = Folder(path.rstrip("/") or path)
    if NAME in folder.list():
        return folder.parent
    for candidate in (folder, folder / "checkpoint"):
        if steps_in(candidate):
            return candidate
    raise UserError.one(path, "there are no checkpoints here", "name a run's directory, or its folder of checkpoints")


def checkpoints_at(path: str) -> list[Entry]:
    """Every checkpoint that ``path`` means, the newest first: those of a run; or, of a checkpoint that is none of a run's (a
    converted one, in a folder of another name), that one.

    Raises:
        UserError: there are none.
    """
    own = Folder(path.rstrip("/") or path)
    found = list(entries(find_checkpoints(path)))
    if NAME not in own.list() or any(one.folder.name == own.name for one in found):
        return found
    one = entry(own, -1)
    return [one if one.manifest is None else replace(one, step=one.manifest.step)]


def pick(path: str, step: int | None) -> Entry:
    """The checkpoint that ``path`` and ``step`` mean.

    Raises:
        UserError: there is none, or it is not complete.
    """
    own = Folder(path.rstrip("/"))
    if step is None and NAME in own.list():
        found = entry(own, -1)
    elif step is None:
        folder = find_checkpoints(path)
        found = next(
            (one for one in entries(folder) if one.manifest is not None), Entry(-1, folder, None, "none is complete")
        )
    else:
        found = entry(step_folder(find_checkpoints(path), step), step)
    if found.manifest is None:
        raise UserError.one(str(found.folder), found.problem, "`titan checkpoint list` shows what there is")
    return found


def _path_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="a run's directory, its folder of checkpoints, or one of them; a path or URL"
    )


def _describe(one: Entry) -> dict[str, Any]:
    manifest = one.manifest
    described: dict[str, Any] = {"step": one.step, "path": str(one.folder), "complete": manifest is not None}
    if manifest is None:
        return {**described, "problem": one.problem}
    return {
        **described,
        "step": manifest.step,
        "created": manifest.created,
        "bytes": manifest.num_bytes,
        "mesh": manifest.about.get("mesh", {}),
        "world_size": manifest.about.get("world_size"),
        "model": manifest.about.get("model"),
        "model_only": manifest.model_only,
    }


def _state(one: Entry) -> str:
    if one.manifest is None:
        return one.problem
    return "complete, weights alone" if one.manifest.model_only else "complete"


def _mesh(manifest: Manifest) -> str:
    mesh = manifest.about.get("mesh", {})
    return " x ".join(f"{name}={degree}" for name, degree in mesh.items()) or "one device"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _age(created: str) -> str:
    seconds = (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(created)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


class Advance(Protocol):
    """Moves a progress bar on."""

    def __call__(self, amount: int) -> None:
        """By ``amount``."""
        ...


@contextmanager
def progress(what: str, total: int, quiet: bool, of_bytes: bool = False) -> Iterator[Advance]:
    """A bar on a terminal; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    done = DownloadColumn() if of_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)
