"""Stored models: their description, which does not import torch, and loading their weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, Final

from titan_ckpt.foreign.config import CONFIG_OF, hf_about, kind_of, model_for, read_config, require_shards
from titan_ckpt.foreign.hf_export import tokenizer_in
from titan_ckpt.format.catalogue import pick
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import model_of, read_manifest
from titan_ckpt.format.stored import Manifest
from titan_ckpt.format.tokenizer_files import MAIN, local_path
from titan_core.api import (
    ModelHub,
    Problem,
    Recipe,
    Ref,
    Registry,
    StoredModel,
    Transform,
    UserError,
    WeightFormat,
    WeightsContext,
)
from titan_core.api.config.numbers import LARGEST
from titan_core.toolkit.errors import nearest_path
from titan_core.toolkit.text import shorten, show

NAME_ON_HUB: Final = re.compile(r"[\w.-]+/[\w.-]+")


def find(path: str, registry: Registry) -> StoredModel:
    """Return the model at ``path``: a run's directory, a checkpoint, a folder of Hugging Face or Meta weights, or the name
    of a downloaded model.

    Raises:
        UserError: there is none, or no installed plugin knows the model.
    """
    path = located(path, registry)
    folder = Path(path)
    kind = kind_of(folder) if folder.is_dir() else None
    if kind is not None:
        return _foreign(folder, kind, registry)
    if (folder / CONFIG_OF["safetensors"]).is_file():
        why = f"contains {CONFIG_OF['safetensors']}, but no weights in safetensors format"
        raise UserError.one(path, why, "download its *.safetensors files, or convert the model with save_pretrained()")
    if "://" not in path and not folder.exists():
        raise UserError.one(path, "does not exist", nearest_path(path))
    if folder.is_file():
        raise UserError.one(path, "is a file", "give a run's directory, a checkpoint or a folder of weights")
    found = pick(path, None)
    assert found.manifest is not None
    about = found.manifest.about
    model, args = model_of(found.manifest, registry)
    settings = {"name": model.name, "args": args.model_dump(mode="json"), **_tokenizer(found.folder, found.manifest)}
    sections: dict[str, dict[str, Any]] = {"model": settings}
    seq_len = about.get("config", {}).get("training", {}).get("seq_len")
    if seq_len is not None:
        sections["training"] = {"seq_len": seq_len}
    for transform in registry.all(Transform):
        if transform.adds and transform.config and (table := about.get("config", {}).get(transform.config.section)):
            sections[transform.config.section] = table
    step = found.manifest.step or None
    origin = {key: about[key] for key in ("hf",) if key in about}
    load = Ref[Any]("titan_ckpt.stored_model:load_own")
    return StoredModel(str(found.folder), sections, load, _end_ids(about, found.folder), step, origin=origin)


def _foreign(folder: Path, kind: str, registry: Registry) -> StoredModel:
    config = read_config(folder, kind)
    model, form, args = model_for(kind, config, registry, None, folder)
    if kind == "safetensors":
        require_shards(folder)
    settings = {"name": model.name, "args": args.model_dump(mode="json"), **tokenizer_in(folder)}
    about = hf_about(folder) if kind == "safetensors" else {}
    load = Ref[Any]("titan_ckpt.stored_model:load_foreign")
    return StoredModel(
        str(folder), {"model": settings}, load, _end_ids(about, folder), notes=tuple(_notes(form, config)), origin=about
    )


def _notes(form: WeightFormat, config: Mapping[str, Any]) -> Sequence[str]:
    given = [] if form.notes is None else form.notes.call_list(str, config)
    notes = [f"{CONFIG_OF[form.files]}: {note}" for note in given]
    stored = config.get("dtype") or config.get("torch_dtype")  # as transformers reads them
    if stored not in (None, "float32"):
        shown = shorten(stored) if isinstance(stored, str) else show(stored)
        notes.append(f"{CONFIG_OF[form.files]}: the weights are stored in {shown}; training keeps them in float32")
    return notes


def _end_ids(about: Mapping[str, Any], where: object) -> tuple[int, ...]:
    """Return the ids in ``eos_token_id`` of the Hugging Face folder that the weights came from.

    Raises:
        UserError: they are no ids. ``where`` names what is being read.
    """
    files = about.get("hf", {})
    for name in ("generation_config", "config"):
        ids = files.get(name, {}).get("eos_token_id")
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < LARGEST for one in listed):
                why = f"must be a token, or a list of them, but is {show(ids)}"
                raise UserError.one(f"{where}: {name}.json: eos_token_id", why, "correct the file, or remove the key")
            return tuple(listed)
    return ()


def _tokenizer(folder: Folder, manifest: Manifest) -> dict[str, Any]:
    """Return the keys of config section ``model`` that select the tokenizer in a checkpoint. The path in the run's config is
    not that of a file to read: who wrote the checkpoint may have named any.

    Raises:
        UserError: a file of the tokenizer is missing or damaged.
    """
    name = (
        manifest.about.get("config", {}).get("model", {}).get("tokenizer", "hf" if MAIN[0] in manifest.tokenizer else None)
    )
    found = {"tokenizer": name, "tokenizer_path": local_path(folder, manifest)}
    return {key: value for key, value in found.items() if value is not None}


def load_foreign(context: WeightsContext) -> None:
    """Load Hugging Face or Meta weights.

    Raises:
        UserError: they are not those of the job's model; on every rank.
    """
    from titan_ckpt.foreign.load import load_foreign as load

    load(context.job, context.world, context.parts, Path(context.stored.path))


def load_own(context: WeightsContext) -> None:
    """Load the weights of a checkpoint of Titan's.

    Raises:
        UserError: the checkpoint is damaged, or its weights are not those of the job's model; on every rank.
    """
    from titan_ckpt.contents.tensors import model_tensors, without_absent
    from titan_ckpt.format.chunks import require_equal_weights
    from titan_ckpt.format.reader import Reader
    from titan_ckpt.resume.comparing import require_same_tensors

    folder, world = Folder(context.stored.path), context.world
    manifest = world.on_first_rank(lambda: read_manifest(folder))
    world.on_first_rank(lambda: require_equal_weights(folder, manifest))
    tensors = without_absent(context.job, model_tensors(context.parts), manifest.tensors)
    # What only training uses, and this job leaves out, is not loaded. Assembly has compared all other arguments.
    job, theirs = context.job, context.stored.sections["model"]["args"]
    mine = job.model_args.model_dump(mode="json")
    less = any(theirs.get(key) != value == mine[key] for key, value in job.family.training_only.items())
    require_same_tensors(job, world, folder, manifest, tensors, excluded=("*",) if less else ())
    if problem := Reader(folder, manifest).load_on_all(tensors, world):
        raise UserError.one(str(folder), problem, "use another checkpoint")


def located(path: str, registry: Registry) -> str:
    """Return the folder of a model that a hub knows by the name ``path``; otherwise ``path``, with ``~`` expanded.

    Raises:
        UserError: the name is that of a model which this machine does not have.
    """
    local = Path(path).expanduser()
    if path in [recipe.name for recipe in registry.all(Recipe)] and not local.exists():
        fix = f"train it first (`titan train {quote(str(path))}`), and give the run's directory, by default outputs/{path}"
        raise UserError.one(path, "is a recipe, not a trained model", fix)
    try:
        exists = local.exists()
    except OSError:  # such as a name that is too long
        exists = False
    if exists or not NAME_ON_HUB.fullmatch(path):
        return path if "://" in path else str(local)
    hubs = registry.all(ModelHub)
    if not hubs:
        why = "does not exist, and no installed plugin finds models by name"
        raise UserError.one(path, why, "check the path, or install titan-data")
    problems: list[Problem] = []
    for hub in hubs:
        try:
            return hub.locate.call(str, path)
        except UserError as error:
            problems += error.problems
    if local.parent.is_dir():  # more likely a path than the name of a model
        why = "does not exist, and no installed plugin knows a model of this name"
        raise UserError.one(path, why, nearest_path(str(local)))
    raise UserError(*problems)
