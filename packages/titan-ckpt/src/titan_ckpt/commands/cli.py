"""``titan checkpoint list | show | verify | rm``, and the arguments of the other commands. Does not import torch."""

from __future__ import annotations

import argparse
import datetime
from typing import Any

from titan_ckpt.format.catalogue import Entry, checkpoints_at, entries, find_checkpoints, pick, step_folder, steps_in
from titan_ckpt.format.manifest import verify_data
from titan_ckpt.format.stored import BrokenCheckpoint, Manifest
from titan_ckpt.format.tokenizer_files import stored_files
from titan_ckpt.progress import progress
from titan_ckpt.save.retention import remove
from titan_core.api import CommandContext, UserError
from titan_core.api.config.numbers import MOST_STEPS
from titan_core.toolkit.arguments import integer, json_argument
from titan_core.toolkit.text import print_json, print_table, say, show_bytes

EXIT_BROKEN = 1


def list_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan checkpoint list``."""
    _path_argument(parser)
    json_argument(parser)


def show_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan checkpoint show``."""
    _path_argument(parser)
    parser.add_argument(
        "--step", type=integer(0, MOST_STEPS), metavar="N", help="step of the checkpoint (default: the newest complete one)"
    )
    parser.add_argument("--tensors", action="store_true", help="also list every tensor")
    json_argument(parser)


def verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan checkpoint verify``."""
    _path_argument(parser)
    parser.add_argument("--step", type=integer(0, MOST_STEPS), metavar="N", help="verify only this step (default: all)")
    json_argument(parser)


def rm_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan checkpoint rm``."""
    _path_argument(parser)
    parser.add_argument("--step", type=integer(0, MOST_STEPS), nargs="+", required=True, metavar="N", help="steps to remove")
    parser.add_argument("--force", action="store_true", help="remove them even if no complete checkpoint is left")


def merge_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan checkpoint merge``."""
    what = "run, of which the newest checkpoint is taken, or checkpoint; a path or URL"
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help=what)
    parser.add_argument("target", metavar="TARGET", help="new folder for the merged checkpoint")
    of_run = parser.add_mutually_exclusive_group()
    most = 10_000
    of_run.add_argument("--last", type=integer(1, most), metavar="K", help="merge the last K checkpoints of the run")
    steps = integer(0, MOST_STEPS)
    of_run.add_argument("--steps", type=steps, nargs="+", metavar="N", help="merge the run's checkpoints of these steps")
    parser.add_argument(
        "--averages", action="store_true", help="take the averaged weights that the run has kept (averages.kind)"
    )


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan checkpoint convert``."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="Titan checkpoint, or folder of Hugging Face, Meta or torch.distributed.checkpoint (DCP) weights",
    )
    parser.add_argument("target", metavar="TARGET", help="new folder for the exported weights or the Titan checkpoint")
    parser.add_argument(
        "--to", choices=("hf", "dcp"), help="format to export a Titan checkpoint to: Hugging Face (default), or DCP"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="data type of the weights (default: unchanged)"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="model that the weights belong to, if several installed models support them"
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer to copy beside the weights (default: the run's, or the source's)"
    )
    parser.add_argument(
        "--inference",
        action="store_true",
        help="leave out what only training uses, such as blocks of multi-token prediction (Hugging Face exports)",
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="repository on the Hugging Face hub to push the exported folder to (private unless it exists)",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read the metadata of a DCP folder, a pickle, with a restricted unpickler",
    )
    parser.add_argument(
        "--recipe",
        metavar="RECIPE|FILE",
        default=argparse.SUPPRESS,
        help="recipe whose model a DCP folder contains; --model.flavor and other --model.* keys override it",
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="entries of a DCP folder not to import"
    )


def list_checkpoints(context: CommandContext) -> int:
    """Print every checkpoint of a run, newest first."""
    arguments = context.arguments
    found = checkpoints_at(arguments.path)
    if arguments.json:
        print_json([_describe(checkpoint) for checkpoint in found])
        return 0
    rows = [
        (
            str(checkpoint.step) if checkpoint.step >= 0 else "?",
            _mesh(checkpoint.manifest) if checkpoint.manifest else "?",
            show_bytes(checkpoint.manifest.num_bytes) if checkpoint.manifest else "?",
            _age(checkpoint.manifest.created) if checkpoint.manifest else "?",
            _state(checkpoint),
        )
        for checkpoint in found
    ]
    print_table(("step", "mesh", "size", "age", f"state of {arguments.path}"), rows)
    return 0


def show(context: CommandContext) -> int:
    """Print the contents of a checkpoint."""
    arguments = context.arguments
    found = pick(arguments.path, arguments.step)
    manifest = found.manifest
    assert manifest is not None
    if arguments.json:
        print_json({**_describe(found), "about": manifest.about, "tensors": {
            name: {"dtype": tensor.dtype, "shape": tensor.shape} for name, tensor in manifest.tensors.items()
        } if arguments.tensors else len(manifest.tensors)})  # fmt: skip
        return 0
    plugins = manifest.about.get("plugins", {})
    rows = [
        ("step", f"{manifest.step}"),
        ("model", str(manifest.about.get("model", "?"))),
        ("mesh", _mesh(manifest)),
        ("saved", f"{manifest.created} ({_age(manifest.created)} ago)"),
        ("size", f"{show_bytes(manifest.num_bytes)} in {len(manifest.files)} file(s), {len(manifest.tensors)} tensors"),
        ("contents", "weights only" if manifest.model_only else "complete state of the run"),
        ("written by", ", ".join(f"{name} {version}" for name, version in plugins.items())),
        ("torch", str(manifest.about.get("torch", "?"))),
    ]
    if arguments.tensors:
        rows += [(name, f"{tensor.dtype} {list(tensor.shape)}") for name, tensor in manifest.tensors.items()]
    print_table(("", str(found.folder)), rows)
    return 0


def verify(context: CommandContext) -> int:
    """Verify every byte by checksum. The exit status is 1 if a checkpoint is incomplete or damaged."""
    arguments = context.arguments
    found = [pick(arguments.path, arguments.step)] if arguments.step is not None else checkpoints_at(arguments.path)
    verdicts = {}
    for checkpoint in found:
        problem, manifest = checkpoint.problem, checkpoint.manifest
        if manifest is not None:
            try:
                with progress(f"step {checkpoint.step}", manifest.num_bytes, arguments.json, of_bytes=True) as advance:
                    for num_bytes in verify_data(checkpoint.folder, manifest):
                        advance(num_bytes)
                stored_files(checkpoint.folder, manifest)
            except (BrokenCheckpoint, OSError) as error:
                problem = str(error)
        verdicts[checkpoint.step] = problem
        if not arguments.json:
            name = f"step {checkpoint.step}" if checkpoint.step >= 0 else str(checkpoint.folder)
            say(f"{name}: {problem or 'intact'}")  # a problem may quote the names of tensors
    if arguments.json:
        print_json([{"step": step, "intact": not problem, "problem": problem} for step, problem in verdicts.items()])
    return EXIT_BROKEN if any(verdicts.values()) else 0


def rm(context: CommandContext) -> int:
    """Remove checkpoints."""
    arguments = context.arguments
    folder = find_checkpoints(arguments.path)
    present = steps_in(folder)
    for step in arguments.step:
        if step not in present:
            raise UserError.one(str(folder), f"there is no step {step}", f"choose from {', '.join(map(str, present))}")
    left = [found for found in entries(folder) if found.manifest is not None and found.step not in arguments.step]
    if not left and not arguments.force:
        raise UserError.one(str(folder), "no complete checkpoint would be left", "add --force to remove them anyway")
    for step in dict.fromkeys(arguments.step):
        remove(folder, step)
        say(f"removed {step_folder(folder, step)}")
    return 0


def _path_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="run directory, folder of checkpoints, or single checkpoint; a path or URL"
    )


def _describe(checkpoint: Entry) -> dict[str, Any]:
    manifest = checkpoint.manifest
    described: dict[str, Any] = {"step": checkpoint.step, "path": str(checkpoint.folder), "complete": manifest is not None}
    if manifest is None:
        return {**described, "problem": checkpoint.problem}
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


def _state(checkpoint: Entry) -> str:
    if checkpoint.manifest is None:
        return checkpoint.problem
    return "complete, weights only" if checkpoint.manifest.model_only else "complete"


def _mesh(manifest: Manifest) -> str:
    mesh = manifest.about.get("mesh", {})
    return " x ".join(f"{name}={degree}" for name, degree in mesh.items()) or "one device"


def _age(created: str) -> str:
    seconds = (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(created)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
