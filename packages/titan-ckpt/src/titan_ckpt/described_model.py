"""Models that a config file describes. Their weights need not exist. Free of torch, unless the model's plugin needs it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from titan_ckpt.foreign.config import CONFIG_OF, DOWNLOAD_AGAIN, QUANTISED, model_for
from titan_ckpt.foreign.hf_export import tokenizer_in
from titan_ckpt.stored_model import NAME_ON_HUB
from titan_core.api import ModelHub, Problem, Registry, UserError
from titan_core.toolkit.errors import nearest_path
from titan_core.toolkit.plain_json import read_object


def describe(path: str, registry: Registry) -> dict[str, dict[str, Any]]:
    """Return the config sections of the model whose config file is in the folder ``path``, or that a hub knows by this name.
    How its weights are stored does not matter.

    Raises:
        UserError: there is none, or no installed plugin knows the model.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _described(folder, path, registry)
    hubs = [hub.describe for hub in registry.all(ModelHub) if hub.describe is not None]
    if not NAME_ON_HUB.fullmatch(path) or not hubs:
        raise UserError.one(
            path, "is neither a folder nor the name of a model that an installed plugin finds", nearest_path(path)
        )
    problems: list[Problem] = []
    for hub in hubs:
        with TemporaryDirectory(prefix="titan-model-") as empty:
            try:
                found = hub.call(str, path, empty)
            except UserError as error:
                problems += error.problems
            else:
                return _described(Path(found), path, registry)
    raise UserError(*problems)


def _described(folder: Path, path: str, registry: Registry) -> dict[str, dict[str, Any]]:
    kind = next((kind for kind, name in CONFIG_OF.items() if (folder / name).is_file()), None)
    if kind is None:
        why = f"contains neither {' nor '.join(CONFIG_OF.values())}"
        fix = "name the folder of a model in the format of transformers; its weights are not needed"
        raise UserError.one(path, why, fix)
    config = read_object(folder / CONFIG_OF[kind], DOWNLOAD_AGAIN, inside=folder)
    plain = {key: value for key, value in config.items() if key not in QUANTISED}
    model, _, args = model_for(kind, plain, registry, None, Path(path))
    return {"model": {"name": model.name, "args": args.model_dump(mode="json"), **tokenizer_in(folder)}}
