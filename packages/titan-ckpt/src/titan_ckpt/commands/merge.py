"""``titan checkpoint merge``: the mean of the weights of several checkpoints, or the averages that a run has kept.

The mean of the last checkpoints of a run has a lower loss than any of them (Izmailov et al., arXiv 1803.05407); the mean of
runs that share their beginning too (Wortsman et al., "Model soups", arXiv 2203.05482).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from titan_ckpt.format.catalogue import Entry, entries, find_checkpoints, pick
from titan_ckpt.format.chunks import read_whole, require_equal_weights
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.new_folder import new_folder, require_new
from titan_ckpt.format.stored import MODEL, OBSERVERS, Manifest
from titan_ckpt.format.tokenizer_files import files_of
from titan_ckpt.format.writer import written_weights
from titan_ckpt.progress import progress
from titan_core.api import CommandContext, UserError
from titan_core.toolkit.text import say

AVERAGED = f"{OBSERVERS}.averaged_weights"
"""Prefix of the averages that an observer has saved under the names of parameters, as titan-optim's does."""


def run(context: CommandContext) -> int:
    """Write a checkpoint that contains only weights."""
    arguments, target = context.arguments, Path(context.arguments.target)
    require_new(target, checkpoint=True)
    chosen = _chosen(arguments)
    for one in chosen:
        _require_mergeable(one, chosen[0], arguments.averages)
    with new_folder(target) as partial:
        _merge(chosen, Folder(str(partial)), arguments.averages)
    say(f"wrote {target}: {'averages' if arguments.averages else 'weights'} of {_listed(chosen)}")
    return 0


def _chosen(arguments: argparse.Namespace) -> list[Entry]:
    """Return the checkpoints to merge, the newest of a run first.

    Raises:
        UserError: one does not exist, is given twice, or cannot be read.
    """
    sources: list[str] = arguments.sources
    if arguments.last is None and arguments.steps is None:
        chosen = [pick(source, None) for source in sources]
    elif len(sources) > 1:
        raise UserError.one("--last" if arguments.last else "--steps", "chooses from one run", "give one SOURCE")
    elif arguments.steps is not None:
        chosen = [pick(sources[0], step) for step in arguments.steps]
    else:
        complete = [found for found in entries(find_checkpoints(sources[0])) if found.manifest is not None]
        chosen = complete[: arguments.last]
        if len(chosen) < arguments.last:
            why = f"has {len(complete)} complete checkpoint(s), fewer than {arguments.last}"
            raise UserError.one(sources[0], why, "lower --last; checkpoint.keep_latest_k is how many a run keeps")
    folders = [str(one.folder) for one in chosen]
    if twice := {folder for folder in folders if folders.count(folder) > 1}:
        raise UserError.one(min(twice), "is given twice", "name each checkpoint once")
    if len(chosen) == 1 and not arguments.averages:
        why = "is a single checkpoint, with nothing to merge"
        raise UserError.one(folders[0], why, "name several, or use --last K, --steps N ... or --averages")
    return chosen


def _require_mergeable(one: Entry, first: Entry, averages: bool) -> None:
    """Require ``one`` to have the tensors of ``first``, and averages if they are asked for.

    Raises:
        UserError: it does not.
    """
    ours, theirs = _manifest(one), _manifest(first)
    where = str(one.folder)
    for key, what in (("model_name", "model"), ("model_args", "shape of the model")):
        if ours.about.get(key) != theirs.about.get(key):
            raise UserError.one(where, f"is of another {what} than {first.folder}", "merge checkpoints of one model")
    of_model, expected = ({name: one.shape for name, one in it.tensors.items() if name.startswith(f"{MODEL}.")}
                          for it in (ours, theirs))  # fmt: skip
    if of_model != expected:
        name = min(name for name in of_model.keys() | expected.keys() if of_model.get(name) != expected.get(name))
        raise UserError.one(where, f"differs from {first.folder} in {name}", "merge checkpoints of one model")
    require_equal_weights(one.folder, ours)
    if not averages:
        return
    if ours.diverging_replicas > 1:
        why = f"its {ours.diverging_replicas} replicas average weights of their own, also where their weights are equal"
        raise UserError.one(where, why, "leave out --averages")
    states = f"{AVERAGED}.states"
    if states not in ours.tensors:
        fix = 'train with averages.kind = "exponential" (titan-optim), or leave out --averages'
        raise UserError.one(where, "contains no averaged weights", fix)
    if not read_whole(one.folder, ours, states).item():
        why = "was saved before the first average"
        raise UserError.one(where, why, "use a later checkpoint (averages.start_step), or leave out --averages")


def _merge(chosen: Sequence[Entry], folder: Folder, averages: bool) -> None:
    """Write the mean of the checkpoints' weights, with one tensor in memory at a time. What is not floating-point, such as a
    counter, is that of the first."""
    newest = _manifest(chosen[0])
    merged = {"of": [str(one.folder) for one in chosen], "averages": averages}
    about: dict[str, Any] = {**newest.about, "merged": merged}
    about.pop("diverging_replicas", None)  # the first represents all
    names = [name for name in newest.tensors if name.startswith(f"{MODEL}.")]
    tokenizer = files_of(chosen[0].folder, newest)
    with written_weights(folder, newest.step, about, tokenizer) as writer, progress("tensors", len(names), False) as advance:
        for name in names:
            writer.add(name.removeprefix(f"{MODEL}."), _mean(chosen, name, averages))
            advance(1)


def _mean(chosen: Sequence[Entry], name: str, averages: bool) -> Tensor:
    """Return the mean of a tensor, computed in fp64, in the type in which the first checkpoint stores it."""
    first = _read(chosen[0], name, averages)
    if not first.is_floating_point():
        return first
    total = first.double()
    for one in chosen[1:]:
        total += _read(one, name, averages)
    return total.div_(len(chosen)).to(first.dtype)


def _read(one: Entry, name: str, averages: bool) -> Tensor:
    """Read a tensor, or its average if ``averages`` and there is one."""
    manifest, averaged = _manifest(one), name.replace(MODEL, AVERAGED, 1)
    return read_whole(one.folder, manifest, averaged if averages and averaged in manifest.tensors else name)


def _manifest(one: Entry) -> Manifest:
    assert one.manifest is not None
    return one.manifest


def _listed(chosen: Sequence[Entry]) -> str:
    return ", ".join(f"step {_manifest(one).step}" if one.step >= 0 else str(one.folder) for one in chosen)
