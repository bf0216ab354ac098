"""Weights for commands that do not train: the model that they belong to, and loading them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_ckpt.catalogue import pick
from titan_ckpt.exporting import model_of
from titan_ckpt.foreign_checks import read_config
from titan_ckpt.foreign_files import kind_of
from titan_ckpt.foreign_start import hf_about
from titan_ckpt.hf_export import tokenizer_in
from titan_ckpt.importing import model_for
from titan_ckpt.manifest import read_manifest
from titan_core.api.errors import UserError
from titan_core.api.ref import Ref
from titan_core.api.registry import ComponentRegistry
from titan_core.api.stored_model import StoredModel, WeightsContext


def find(path: str, registry: ComponentRegistry) -> StoredModel:
    """Return the model at ``path``: a run's directory, a checkpoint, or a folder of Hugging Face or Meta weights.

    Raises:
        UserError: there is none, or no installed plugin knows the model.
    """
    folder = Path(path)
    kind = kind_of(folder) if folder.is_dir() else None
    if kind is not None:
        model, _, args = model_for(kind, read_config(folder, kind), registry, None, folder)
        settings = {"name": model.name, "args": args.model_dump(mode="json"), **tokenizer_in(folder)}
        ends = _end_ids(hf_about(folder)) if kind == "hf" else ()
        return StoredModel(str(folder), {"model": settings}, Ref("titan_ckpt.stored_model:load_foreign"), ends)
    found = pick(path, None)
    assert found.manifest is not None
    about = found.manifest.about
    model, args = model_of(found.manifest, registry)
    settings = {"name": model.name, "args": args.model_dump(mode="json"), **_tokenizer(about, found.folder.local_path)}
    sections: dict[str, dict[str, Any]] = {"model": settings}
    seq_len = about.get("config", {}).get("training", {}).get("seq_len")
    if seq_len is not None:
        sections["training"] = {"seq_len": seq_len}
    step = found.manifest.step or None
    return StoredModel(str(found.folder), sections, Ref("titan_ckpt.stored_model:load_own"), _end_ids(about), step)


def _end_ids(about: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids in ``eos_token_id`` of the Hugging Face folder that the weights came from."""
    files = about.get("hf", {})
    for name in ("generation_config", "config"):
        ids = files.get(name, {}).get("eos_token_id")
        if ids is not None:
            return tuple(map(int, ids if isinstance(ids, list) else [ids]))
    return ()


def _tokenizer(about: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The run's tokenizer, or the one beside the weights."""
    of_run = about.get("config", {}).get("model", {})
    if "tokenizer" in of_run:
        return {key: of_run[key] for key in ("tokenizer", "tokenizer_path") if of_run.get(key)}
    return tokenizer_in(folder) if folder is not None else {}


def load_foreign(context: WeightsContext) -> None:
    """Load Hugging Face or Meta weights.

    Raises:
        UserError: they are not those of the job's model; on every rank.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    from titan_ckpt.foreign_start import open_foreign

    path, opened, mistake = Path(context.stored.path), None, None
    try:
        kind = kind_of(path)
        assert kind is not None
        opened = open_foreign(context.job, context.world, context.parts, path, kind)
    except UserError as error:
        mistake = error
    context.world.raise_together(mistake)
    assert opened is not None
    tensors, reader = opened
    load(tensors, storage_reader=reader)


def load_own(context: WeightsContext) -> None:
    """Load the weights of a checkpoint of Titan's.

    Raises:
        UserError: the checkpoint is damaged, or its weights are not those of the job's model; on every rank.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from titan_ckpt.diverging_replicas import require_equal_weights
    from titan_ckpt.folder import Folder
    from titan_ckpt.reader import Reader
    from titan_ckpt.restoring import require_same_tensors
    from titan_ckpt.tensors import model_tensors

    folder, world = Folder(context.stored.path), context.world
    manifest = world.on_first_rank(lambda: read_manifest(folder))
    world.on_first_rank(lambda: require_equal_weights(folder, manifest))
    tensors = model_tensors(context.parts)
    require_same_tensors(context.job, world, folder, manifest, tensors)
    try:
        load(tensors, storage_reader=Reader(folder, manifest))
    except CheckpointException as error:
        reasons = [reason[0] if isinstance(reason, tuple) else reason for reason in error.failures.values()]
        raise UserError.one(str(folder), str(reasons[0]), "use another checkpoint") from None
