"""Config files beside foreign weights, and the models that they describe. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from titan_ckpt.format.catalogue import DCP_METADATA
from titan_core.api import Model, Registry, UserError, WeightFormat
from titan_core.toolkit.plain_json import read_object
from titan_core.toolkit.text import show, show_mistakes

CONFIG_OF: Final = {"hf": "config.json", "meta": "params.json"}
HF_INDEX: Final = "model.safetensors.index.json"
DOWNLOAD_AGAIN: Final = "download it again"
_QUANTISED = ("quantization_config", "compression_config", "quantization")


def kind_of(folder: Path) -> str | None:
    """Return ``"hf"``, ``"meta"`` or ``"dcp"``, or ``None`` if the folder contains none of these formats."""
    if any(folder.glob("*.safetensors")):
        return "hf"
    if any(folder.glob("consolidated.*.pth")):
        return "meta"
    return "dcp" if (folder / DCP_METADATA).is_file() else None


def read_config(folder: Path, kind: str) -> dict[str, Any]:
    """Read the config file beside the weights.

    Raises:
        UserError: the file is missing or damaged, the weights are quantised according to it, or the format has no such file.
    """
    if kind == "dcp":
        fix = f"convert it first: `titan checkpoint convert {quote(str(folder))} NEW_FOLDER --recipe RECIPE --allow-pickle`"
        raise UserError.one(str(folder), "is a torch.distributed.checkpoint folder, which does not describe its model", fix)
    path = folder / CONFIG_OF[kind]
    config = read_object(path, DOWNLOAD_AGAIN)
    for key in _QUANTISED:
        if config.get(key):
            method = show(config[key].get("quant_method", "") if isinstance(config[key], dict) else config[key]).strip('"')
            why = f"these weights are quantised according to {key} ({method})"
            raise UserError.one(str(path), why, "use the model in bfloat16 or float32, or dequantise it first")
    return config


def read_args(form: WeightFormat, config: Mapping[str, Any]) -> BaseModel:
    """Return the arguments of the model that ``config`` describes.

    Raises:
        ValueError: ``config`` describes no model of this kind.
    """
    assert form.to_args is not None
    try:
        return form.to_args.load()(config)
    except KeyError as error:
        raise ValueError(f"{error} is missing") from None
    except ValidationError as error:
        raise ValueError(show_mistakes(error, lambda key, value: _key_in(config, value) or key)) from error
    except (TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"a value has the wrong type or size: {error}") from error


def _key_in(config: Mapping[str, Any], value: Any) -> str | None:
    """Return the only key of the file with this value: the file's name of an argument that the model's class refused."""
    inner = {f"{table}.{key}": one for table, of in config.items() if isinstance(of, dict) for key, one in of.items()}
    found = [
        key for key, one in (dict(config) | inner).items() if type(one) in (int, float) and value in (one, _as_float(one))
    ]
    return found[0] if len(found) == 1 else None


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def hf_about(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the Hugging Face config files beside the weights, which checkpoints keep for later exports.

    Raises:
        UserError: a config file is damaged.
    """
    found = {name: path / f"{name}.json" for name in ("config", "generation_config")}
    return {"hf": {name: read_object(file, DOWNLOAD_AGAIN) for name, file in found.items() if file.exists()}}


def model_for(
    kind: str, config: Mapping[str, Any], registry: Registry, wanted: str | None, source: Path
) -> tuple[Model, WeightFormat, BaseModel]:
    """Return the model that these weights belong to.

    Raises:
        UserError: no installed model supports them. The message contains the reason of each model.
    """
    reasons = []
    for model, form in _formats(registry, kind):
        if wanted is not None and model.name != wanted:
            continue
        try:
            return model, form, read_args(form, config)
        except ValueError as error:
            reasons.append(f"{model.name}: {' '.join(str(error).split())}")
    why = ": ".join(["no installed model supports these weights", *(["; ".join(reasons)] if reasons else [])])
    raise UserError.one(str(source / CONFIG_OF.get(kind, "")), why, "use another model, or install the plugin of this one")


def _formats(registry: Registry, kind: str) -> Iterator[tuple[Model, WeightFormat]]:
    return ((model, form) for model in registry.all(Model) for form in model.formats if form.name == kind)


def require_shards(folder: Path) -> None:
    """Require each file that the index of a Hugging Face folder lists, if it has an index.

    Raises:
        UserError: the index is invalid, or a file is missing.
    """
    files = set(weight_map(folder / HF_INDEX).values()) if (folder / HF_INDEX).exists() else ()
    missing = sorted(file for file in files if not (folder / file).exists())
    if missing:
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        raise UserError.one(str(folder / missing[0]), f"is missing{more}, but the index lists it", "download it")


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor according to the index.

    Raises:
        UserError: the index is invalid, or lists a file outside its folder.
    """
    contents = read_object(index, DOWNLOAD_AGAIN).get("weight_map")
    if not isinstance(contents, dict) or not all(isinstance(file, str) for file in contents.values()):
        raise UserError.one(str(index), "must contain a weight_map from tensors to files", DOWNLOAD_AGAIN)
    for file in contents.values():
        if not file.endswith(".safetensors") or file != Path(file).name or "\\" in file or "\0" in file:
            raise UserError.one(
                str(index), f"lists {file!r}, which is not a .safetensors file in its folder", "do not use this folder"
            )
    return contents
