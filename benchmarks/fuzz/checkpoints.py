"""Damaged checkpoints: each must be refused in one line, or restore what was saved.

A small checkpoint is made once. Each case damages a copy: either bytes, without regard to checksums, or the manifest, with a
new checksum, so that only contradictions within the manifest reveal the damage. The copy is then verified and restored in
this process, by the code that a user's command runs. Changing a number into another valid one under a new checksum is
undetectable, and is not tried.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import random
import re
import shutil
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz.damage import damage_bytes, places, wrong_type
from titan_ckpt.config import CheckpointSection
from titan_ckpt.contents import state as plain
from titan_ckpt.contents.optimizer_state import group_values, parameter_names, state_of
from titan_ckpt.contents.tensors import model_tensors
from titan_ckpt.format.chunks import bytes_of, read_whole
from titan_ckpt.format.folder import Folder, write_all
from titan_ckpt.format.index import write_index
from titan_ckpt.format.layout import Layout
from titan_ckpt.format.manifest import read_manifest
from titan_ckpt.format.stored import NAME, chunk_digest, data_file
from titan_ckpt.resume.restoring import restore
from titan_core.api import CheckpointContext, Ref, UserError
from titan_core.api.config.resolved import Override
from titan_core.cli.main import main
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.loop import training
from titan_core.plugins.registry import Components

SECONDS = 10.0
"""Processor time that a case may take: the machine may be busy."""
STEP = 2
TINY = {
    "model.args": "{dim = 16, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 16}",
    "training.seq_len": "8",
    "training.local_batch_size": "1",
    "training.steps": "4",
    "checkpoint.enable": "true",
    "sample.enable": "false",
    "job.device": "cpu",
}


def run(count: int, seed: int, folder: Path) -> list[str]:
    """Try ``count`` damaged checkpoints in ``folder``; return the failures."""
    folder.mkdir(parents=True, exist_ok=True)
    original = folder / "original"
    with redirect_stdout(StringIO()):
        training.train(_job({"training.stop_at_step": str(STEP), "job.dump_folder": str(original)}))
        whole = original / "checkpoint" / f"step-{STEP}"
        _divide(whole)
        fuzz = _Fuzz(whole, folder, count, seed)
        job = _job({"training.stop_at_step": "0", "job.dump_folder": str(folder / "loading")})
        assert job.checkpoint is not None
        _Fuzz.running = fuzz
        here = Ref[Any](f"{__name__}:store")
        training.train(dataclasses.replace(job, checkpoint=dataclasses.replace(job.checkpoint, build=here)))
    return fuzz.failures


def _job(changes: dict[str, str]) -> Any:
    overrides = [Override(key, value) for key, value in {**TINY, **changes}.items()]
    config, registry = load_config("llama3_debug", overrides, Components.from_installed())
    return assemble(config, registry, 1)


def _divide(folder: Path) -> None:
    """Divide every tensor of two rows or more between two data files, as if two ranks had saved it."""
    contents, here = _read(folder), Folder(str(folder))
    manifest = read_manifest(here)
    parts: dict[int, list[tuple[str, bytes, str]]] = {0: [], 1: []}
    contents["layouts"], contents["tensors"] = [], {}
    for name, stored in manifest.tensors.items():
        whole = read_whole(here, manifest, name)
        rows, *rest = stored.shape or (1,)
        cuts = [0, rows // 2, rows] if rows > 1 else [0, rows]
        for rank, (first, last) in enumerate(pairwise(cuts)):
            part = whole[first:last] if stored.shape else whole
            data, offset = bytes(bytes_of(part)), (first, *(0 for _ in rest))[: len(stored.shape)]
            parts[rank].append((name, data, chunk_digest(name, stored.dtype, offset, tuple(part.shape), data)))
        layout = Layout((cuts, *((0, size) for size in rest))[: len(stored.shape)], range(len(cuts) - 1)).as_json()
        if layout not in contents["layouts"]:
            contents["layouts"].append(layout)
        contents["tensors"][name] = [stored.dtype, contents["layouts"].index(layout)]
    for rank, pieces in parts.items():
        index = {}
        with here.create(data_file(rank)) as file:
            size = 0
            for name, data, digest in pieces:
                write_all(file, memoryview(data))
                index[name] = size, digest
                size += len(data)
            contents["files"][data_file(rank)] = write_index(file, index, size)
    _write(folder, contents)


def _read(folder: Path) -> Any:
    return json.loads((folder / NAME).read_text())["checkpoint"]


def _write(folder: Path, contents: Any) -> None:
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / NAME).write_text(f'{{"sha256": "{digest}", "checkpoint": {text}}}\n')


class _Fuzz:
    """Runs the cases at the point where a run would restore its own checkpoint."""

    running: _Fuzz

    def __init__(self, whole: Path, folder: Path, count: int, seed: int) -> None:
        self.whole, self.folder, self.count, self.seed = whole, folder, count, seed
        self.failures: list[str] = []

    def run(self, context: CheckpointContext[CheckpointSection]) -> None:
        """Run all cases."""
        levels = {name: logging.getLogger(name).level for name in ("titan_ckpt", "titan_core")}
        for name in levels:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.built = group_values(context.state.optimizer)
        assert self._restored(context, self.whole.parent)
        original = self._state(context)
        for number in range(self.count):
            chance = random.Random(f"{self.seed} {number}")
            place = self.folder / "case"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(self.whole, place / self.whole.name)
            case = f"checkpoint {number} of seed {self.seed}: {_damage(chance, place / self.whole.name)}"
            began = time.process_time()
            try:
                with redirect_stderr(StringIO()):
                    status = main(["checkpoint", "verify", str(place)])
                if self._restored(context, place) and (different := _differences(self._state(context), original)):
                    verdict = "intact" if status == 0 else f"damaged ({status})"
                    self.failures.append(f"{case}: restored with other {different}; verify says {verdict}")
            except Exception as error:  # noqa: BLE001 - any exception is a failure
                last = traceback.extract_tb(error.__traceback__)[-1]
                self.failures.append(f"{case}: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")
            if time.process_time() - began > SECONDS:
                self.failures.append(f"{case}: took {time.process_time() - began:.0f} s")
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

    def _restored(self, context: CheckpointContext[CheckpointSection], place: Path) -> bool:
        """Restore a run from the checkpoint; return whether it was accepted."""
        state = context.state
        state.optimizer.state.clear()
        with torch.no_grad():
            for tensor in model_tensors(state.parts).values():
                tensor.fill_(-7)
        state.step = state.tokens_seen = -7
        try:
            return restore(context, Folder(str(place)), self.built).step is not None
        except UserError:
            return False

    def _state(self, context: CheckpointContext[CheckpointSection]) -> dict[str, Any]:
        """Return the whole state of a run, in a form that can be compared."""
        state = context.state
        optimizer = state_of(parameter_names(state.parts), state.optimizer, self.built)
        tensors = {**model_tensors(state.parts), **optimizer.tensors}
        rates = [group["lr"] for group in state.optimizer.param_groups]
        values = {name: json.dumps(value) for name, value in plain.collect(context, optimizer).items()}
        return {"rates": rates, **values, **{name: bytes(bytes_of(tensor)) for name, tensor in tensors.items()}}


def _differences(one: dict[str, Any], other: dict[str, Any]) -> str:
    return ", ".join(sorted(name for name in {*one, *other} if one.get(name) != other.get(name)))


class _Store:
    """A checkpoint store that runs the fuzzer instead of restoring."""

    def __init__(self, context: CheckpointContext[CheckpointSection]) -> None:
        self._context = context

    newest = None

    def restore(self) -> bool:
        _Fuzz.running.run(self._context)
        return True

    def after_step(self, last: bool, requested: bool) -> None:
        pass

    def before_update(self) -> None:
        pass

    def close(self) -> None:
        pass


def store(context: CheckpointContext[CheckpointSection]) -> _Store:
    """Build a :class:`~titan_core.api.CheckpointStore`."""
    return _Store(context)


def _damage(chance: random.Random, folder: Path) -> str:
    """Damage the checkpoint in ``folder``; return what was done."""
    if chance.random() < 0.3:
        return damage_bytes(chance, folder / chance.choice([NAME, data_file(0), data_file(1)]))
    if chance.random() < 0.05:
        os.rename(folder, folder.with_name(name := chance.choice(["step-7", "step-20", "step-0"])))
        return f"renamed to {name}"
    contents = _read(folder)
    if chance.random() < 0.2:
        done = _changed_index(chance, folder, contents)
    else:
        done = chance.choice(_STRUCTURAL)(chance, contents) if chance.random() < 0.6 else _mistype(chance, contents)
    _write(folder, contents)
    return done


def _mistype(chance: random.Random, contents: Any) -> str:
    """Give a value another type, or delete a key that every manifest has."""
    found = [(path, place) for path, place in places(contents) if _is_seen(path)]
    path, (container, key) = chance.choice(found)
    if chance.random() < 0.3 and path.count(".") < 2:
        del container[key]
        return f"{path} deleted"
    wrong = wrong_type(chance, container[key])
    free = ("state.optimizer.groups", "state.lr_scheduler", "state.observers.", "state.generators.")
    if path.startswith(free) and path.count(".") > 1 and wrong is None:
        wrong = "x"  # None is valid there
    container[key] = wrong
    return f"{path} = {wrong!r}"


def _is_seen(path: str) -> bool:
    """Whether restoring checks the type of a value. It cannot check values inside an observer's state. Of the hundreds of
    words of a generator, only some are tried."""
    if path.startswith("state.observers."):
        return path.count(".") < 2
    return not re.search(r"python\.1\.\d{2}", path)


def _runs(chance: random.Random, contents: Any) -> tuple[str, list[list[int]]]:
    """Return the runs of a layout's files, or of its cuts in a dimension."""
    number = chance.randrange(len(contents["layouts"]))
    layout = contents["layouts"][number]
    dim = chance.randrange(-1, len(layout["cuts"]))
    return f"layout {number}, dimension {dim}", layout["files"] if dim < 0 else layout["cuts"][dim]


def _removed(chance: random.Random, contents: Any) -> str:
    where, runs = _runs(chance, contents)
    del runs[chance.randrange(len(runs))]
    return f"{where}: a run removed"


def _doubled(chance: random.Random, contents: Any) -> str:
    where, runs = _runs(chance, contents)
    runs.append(list(chance.choice(runs)))
    return f"{where}: a run duplicated"


def _changed_run(chance: random.Random, contents: Any) -> str:
    where, runs = _runs(chance, contents)
    run = chance.choice(runs)
    run[chance.randrange(3)] += chance.choice([-4, -1, 1, 4, 1 << 40, 1 << 62])
    return f"{where}: {run}"


def _swapped_files(chance: random.Random, contents: Any) -> str:
    number = chance.randrange(len(contents["layouts"]))
    files = contents["layouts"][number]["files"]
    files[:] = [[first + step * (count - 1), -step, count] for first, step, count in reversed(files)]
    return f"layout {number}: files in reverse"


def _changed_index(chance: random.Random, folder: Path, contents: Any) -> str:
    """Change a data file's index, and its checksum with it."""
    name = chance.choice(sorted(contents["files"]))
    size, _, _ = contents["files"][name]
    data = (folder / name).read_bytes()
    index = json.loads(data[size:])
    tensor, other = chance.choice(sorted(index)), chance.choice(sorted(index))
    match chance.randrange(5):
        case 0:
            del index[tensor]
        case 1:
            index[tensor], index[other] = index[other], index[tensor]
        case 2:
            index[tensor][0] += chance.choice([-4, -1, 1, 4, 1 << 40, 1 << 70])
        case 3:
            index[tensor + "x"] = index[tensor]
        case 4:
            index[tensor] = wrong_type(chance, index[tensor])
    text = json.dumps(index).encode()
    (folder / name).write_bytes(data[:size] + text)
    contents["files"][name] = [size, len(text), hashlib.sha256(text).hexdigest()]
    return f"the index of {name}: {tensor} = {index.get(tensor)}"


def _swapped_tensors(chance: random.Random, contents: Any) -> str:
    tensors = contents["tensors"]
    one = chance.choice(sorted(tensors))
    other = chance.choice([name for name in tensors if tensors[name] == tensors[one]])
    tensors[one], tensors[other] = tensors[other], tensors[one]
    return f"{one} and {other} swapped"


def _removed_tensor(chance: random.Random, contents: Any) -> str:
    name = chance.choice(sorted(contents["tensors"]))
    tensor = contents["tensors"].pop(name)
    if chance.random() < 0.5:
        contents["tensors"][name + "x"] = tensor
        return f"{name} renamed"
    return f"{name} removed"


def _changed_tensor(chance: random.Random, contents: Any) -> str:
    name = chance.choice(sorted(contents["tensors"]))
    tensor = contents["tensors"][name]
    if chance.random() < 0.5:
        tensor[0] = chance.choice(["int32", "bfloat16", "float64", "float8_e4m3fn", "complex64", "load", "", "float99"])
    else:
        tensor[1] = chance.choice([-1, 1 << 62, *range(len(contents["layouts"]) + 1)])
    return f"{name}: {tensor}"


def _changed_numbers(chance: random.Random, contents: Any) -> str:
    key = chance.choice(["step", "format", "files", "state"])
    if key == "files":
        contents["files"] = chance.choice(
            [
                {},
                {"data-00000.bin": [1, 1, ""]},
                {**contents["files"], "data-00002.bin": [0, 2, ""]},
                {"../x": [1, 1, ""]},
                {
                    name: [size + by, index - by, sha]
                    for name, (size, index, sha) in contents["files"].items()
                    for by in (4,)
                },
            ]
        )
    elif key == "state":
        contents["state"] = {}
    else:
        contents[key] = chance.choice([1, 7, -1, 10**30])
    return f"{key} = {str(contents[key])[:60]}"


_STRUCTURAL: list[Callable[[random.Random, Any], str]] = [
    _removed,
    _doubled,
    _changed_run,
    _changed_run,
    _swapped_files,
    _swapped_tensors,
    _removed_tensor,
    _changed_tensor,
    _changed_numbers,
]
