"""Checks of a model's weight formats: their declarations, and exported weights against a reader that shares no code with the
format. A format's own inverse undoes its mistakes: it cannot find a transpose, or rows that are exchanged, both ways."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.func import functional_call

from titan_core.api import Model, UserError, WeightFormat
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.cli.main import main
from titan_core.config.pretrained import different_arguments, find_model
from titan_core.model.build import build_whole
from titan_testing.checks import NotTried, model_error
from titan_testing.jobs import make_job

Reader = Callable[[Path, Tensor], Tensor]
"""Exported folder and token ids, ``[batch, seq]`` -> logits, ``[batch, seq, vocab]``, by code that shares nothing with the
format."""
LARGE_UPDATES: Mapping[str, object] = {"training.steps": 2, "checkpoint.enable": "true", "optimizer.lr": 0.05}
"""Overrides of a run whose weights are exported. With initial weights, attention is so uniform that transposed queries
change logits by 1e-4; with these, by 7e-2, while transformers agrees to 2e-7 (Llama, width 32)."""
_WITHIN = 1e-4
"""Largest difference of another implementation's logits, relative to the largest logit."""


def check_formats(job: AssembledJob) -> str:
    """Check that each weight format names each parameter once, and that config files give the same arguments again."""
    model = build_whole(job)
    parameters = {name for name, _ in model.named_parameters()}
    for written in job.family.formats:
        _check_names(job, written, parameters)
        if written.from_args is not None and written.to_args is not None:
            again = written.to_args.load()(written.from_args.load()(job.model_args))
            if again != job.model_args:
                ours, theirs = job.model_args.model_dump(), again.model_dump()
                if lost := different_arguments(ours, theirs, job.family.training_only):
                    why = f"format {written.files!r} loses {', '.join(lost)}"
                    raise model_error(job, why, "write it to the config file, and read it")
    return ", ".join(one.files for one in job.family.formats) or "none"


def _check_names(job: AssembledJob, written: WeightFormat, parameters: set[str]) -> None:
    listed = written.tensors.load()(job.model_args)
    named = Counter(one.parameter for one in listed if not one.copy and not one.buffer)
    foreign = Counter(name for one in listed if not one.rows and not one.copy for name in one.names)
    tied = set(job.model.layout.tied)
    for why in (
        *(f"lacks {name!r}" for name in sorted(parameters - set(named))),
        *(f"names {name!r}, which the model does not have" for name in sorted(set(named) - parameters - tied)),
        *(f"lists parameter {name!r} {count} times" for name, count in named.items() if count > 1),
        *(f"lists tensor {name!r} {count} times" for name, count in foreign.items() if count > 1),
    ):
        raise model_error(job, f"format {written.files!r} {why}", "list each parameter once in its tensors")


def exported_format(family: Model) -> WeightFormat | None:
    """Return the format in which ``titan checkpoint convert`` exports the model; ``None`` if it has none."""
    written = [one for one in family.formats if one.files == "safetensors" and one.from_args is not None]
    return max(written, key=lambda one: one.priority, default=None)


def check_exported(recipe: str, settings: Mapping[str, object], run: Path, exported: Path) -> str:
    """Export the weights of a run, and check that Titan reads the same ones again.

    Args:
        settings: overrides of the run.
        exported: new folder to write.
    """
    with _opened(recipe, settings, run) as (job, model):
        written = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = main(["checkpoint", "convert", str(run), str(exported)])
    if status:
        raise _format_error(job, f"cannot be written: {' '.join(said.getvalue().split())}")
    try:
        with _opened(recipe, settings, exported) as (_, model):
            read = model.state_dict()
    except UserError as error:
        raise _format_error(job, f"cannot be read after Titan has written it: {error.problems[0]}") from error
    for name, tensor in written.items():
        if not read[name].equal(tensor):
            raise _format_error(
                job, f"reads other values of {name!r} than it has written, in {', '.join(_stored_in(job, name))}"
            )
    return f"{len(written)} tensors written and read again"


def check_read_elsewhere(recipe: str, settings: Mapping[str, object], run: Path, exported: Path, reader: Reader) -> str:
    """Check that another reader of exported weights computes the logits of the model.

    Raises:
        NotTried: there is no such reader.
    """
    with _opened(recipe, settings, run) as (job, model):
        tokens = (torch.arange(24) * 7 + 1).remainder(job.model.layout.vocab_size).view(2, 12)
        expected = reader(exported, tokens)
        found = model(tokens)
        if expected.shape != found.shape:
            shapes = f"{list(expected.shape)} in place of {list(found.shape)}"
            raise _format_error(job, f"is read by another reader as a model whose logits have the shape {shapes}")
        if not (difference := relative_difference(found, expected)) <= _WITHIN:
            cause = _cause(job, model, tokens, exported, reader, expected)
            why = f"is read by another reader as a model with other logits, by {difference:.1e} of the largest; {cause}"
            raise _format_error(job, why)
    return f"logits of another reader within {difference:.1e}"


def read_by_transformers(exported: Path, tokens: Tensor) -> Tensor:
    """Return the logits that the class of transformers computes which the exported ``config.json`` names.

    Raises:
        NotTried: it names none, or transformers is not installed or lacks it.
    """
    names = json.loads((exported / "config.json").read_text(encoding="utf-8")).get("architectures") or ["no class"]
    if find_spec("transformers") is None:
        raise NotTried(f"no independent reader: transformers, with {names[0]}, is not installed")
    import transformers

    if (library := getattr(transformers, names[0], None)) is None:
        raise NotTried(f"no independent reader: config.json names {names[0]} of transformers")
    model, keys = library.from_pretrained(exported, dtype=torch.float32, output_loading_info=True, local_files_only=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found := sorted(map(str, keys[what])):
            raise AssertionError(f"{names[0]} of transformers reports {what.replace('_', ' ')}: {', '.join(found[:3])}")
    with torch.no_grad():
        logits: Tensor = model.eval()(tokens).logits
    return logits


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    return float((found - expected).abs().max() / expected.abs().max())


@contextmanager
def _opened(recipe: str, settings: Mapping[str, object], path: Path) -> Iterator[tuple[AssembledJob, nn.Module]]:
    """Yield the model, in evaluation mode, with the weights in ``path``."""
    from titan_core.loop.stored_models import open_model

    job = make_job(recipe, {**settings, "model.from_pretrained": str(path)}, 1)
    with open_model(replace(job, trains=False), find_model(str(path), job.registry)) as loaded:
        yield job, loaded.part.module


def _cause(job: AssembledJob, model: nn.Module, tokens: Tensor, exported: Path, reader: Reader, expected: Tensor) -> str:
    """Return which parameters explain ``expected``, the logits of ``reader``, or which tensors of the files explain those of
    the model, if they are transposed or exchanged, in all blocks alike."""
    from safetensors.torch import load_file, save_file

    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    for what, changed in _changes(weights):
        if relative_difference(functional_call(model, changed, (tokens,)), expected) <= _WITHIN:
            names = sorted({name for parameter in changed for name in _stored_in(job, parameter)})
            return f"they are equal with parameters {what} (in {', '.join(names[:2])})"
    found, stored = model(tokens), load_file(exported / "model.safetensors")
    with TemporaryDirectory() as folder:
        other = shutil.copytree(exported, Path(folder) / "other")
        for what, changed in _changes(stored):
            save_file({**stored, **changed}, other / "model.safetensors", metadata={"format": "pt"})
            if relative_difference(reader(other, tokens), found) <= _WITHIN:
                return f"they are equal with tensors {what}"
    return "no single tensor, transposed or exchanged with another, explains it: compare rows, scales and the config file"


def _changes(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield what each change is, and the tensors that it changes: those of one pattern, in all blocks alike."""
    alike: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), {})[name] = tensor
    for pattern, members in alike.items():
        shape = next(iter(members.values())).shape
        if len(shape) > 1 and shape[-1] == shape[-2]:
            yield f"{pattern!r} transposed", {name: tensor.mT.contiguous() for name, tensor in members.items()}
        if shape and shape[0] % 2 == 0:
            halves = {name: tensor.roll(shape[0] // 2, 0) for name, tensor in members.items()}
            yield f"{pattern!r}, whose halves of rows are exchanged", halves
    for (pattern, members), (other, others) in combinations(alike.items(), 2):
        if [one.shape for one in members.values()] == [one.shape for one in others.values()]:
            values = [one.clone() for one in (*others.values(), *members.values())]
            yield f"{pattern!r} and {other!r} exchanged", dict(zip([*members, *others], values, strict=True))


def _stored_in(job: AssembledJob, parameter: str) -> list[str]:
    """Return the tensors of the format that have a parameter."""
    written = exported_format(job.family)
    listed = written.tensors.load()(job.model_args) if written is not None else ()
    return [name for one in listed if one.parameter == parameter and not one.copy for name in one.names]


def _format_error(job: AssembledJob, why: str) -> UserError:
    return model_error(job, f"format 'safetensors' {why}", "correct the tensors, or the config file, of its WeightFormat")
