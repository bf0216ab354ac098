"""Config files beside foreign weights, and the models that they describe. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from titan_ckpt.format.catalogue import DCP_METADATA
from titan_core.api import Model, Registry, UserError, WeightFormat
from titan_core.toolkit.files import LONGEST_TABLE
from titan_core.toolkit.plain_json import read_object
from titan_core.toolkit.text import show, show_mistakes

FILES: Final = {
    "safetensors": "*.safetensors",
    "consolidated": "consolidated.*.pth",
    "dcp": DCP_METADATA,
}
"""Files that weights are read from (:attr:`~titan_core.api.WeightFormat.files`) -> pattern of a file in such a folder."""
CONFIG_OF: Final = {"safetensors": "config.json", "consolidated": "params.json"}
HF_INDEX: Final = "model.safetensors.index.json"
DOWNLOAD_AGAIN: Final = "download it again"
QUANTISED: Final = ("quantization_config", "compression_config", "quantization")


def kind_of(folder: Path) -> str | None:
    """Return which of :data:`FILES` the folder contains, or ``None``.

    Raises:
        UserError: it contains an adapter and no weights of a model.
    """
    found = {kind: [file.name for file in folder.glob(pattern)] for kind, pattern in FILES.items()}
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and all(name.startswith("adapter_") for names in found.values() for name in names):
        base = read_object(adapter, DOWNLOAD_AGAIN, inside=folder).get("base_model_name_or_path")
        why = f"contains an adapter (PEFT) of the model {show(base)}, and not the weights of a model"
        raise UserError.one(str(folder), why, "merge the adapter into its model, and name the folder of the merged model")
    return next((kind for kind, names in found.items() if names), None)


def read_config(folder: Path, kind: str) -> dict[str, Any]:
    """Read the config file beside the weights.

    Raises:
        UserError: the file is missing or damaged, the weights are quantised according to it, or the format has no such file.
    """
    if kind == "dcp":
        fix = f"convert it first: `titan checkpoint convert {quote(str(folder))} NEW_FOLDER --recipe RECIPE --allow-pickle`"
        raise UserError.one(str(folder), "is a torch.distributed.checkpoint folder, which does not describe its model", fix)
    path = folder / CONFIG_OF[kind]
    config = read_object(path, DOWNLOAD_AGAIN, inside=folder)
    for key in QUANTISED:
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
    if form.to_args is None:
        raise ValueError("its plugin does not read the config file of these weights")
    try:
        return form.to_args.call(BaseModel, config)
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
    return {"hf": {name: read_object(file, DOWNLOAD_AGAIN, inside=path) for name, file in found.items() if file.exists()}}


def model_for(
    kind: str, config: Mapping[str, Any], registry: Registry, wanted: str | None, source: Path
) -> tuple[Model, WeightFormat, BaseModel]:
    """Return the model that these weights belong to.

    Raises:
        UserError: no installed model supports them. The message contains the reason of each model.
    """
    candidates: list[tuple[Model, WeightFormat]] = []
    reasons: list[str] = []
    for model in registry.all(Model):
        if wanted in (None, model.name):
            try:
                candidates += [(model, form) for form in formats_of(model, kind)]
            except UserError as error:
                reasons.append(f"{model.name}: {error.problems[0].why}")
    found = accepting(candidates, config, str(source / CONFIG_OF.get(kind, "")), reasons)
    if found is None:
        # The format of the lowest priority, which reads most families, knows best what is wrong.
        shown = [*reasons[-1:], *map(_briefly, reversed(reasons[:-1]))]
        why = ": ".join(["no installed model supports these weights", *(["; ".join(shown)] if shown else [])])
        fix = "use other weights, or install a plugin whose model reads these (titan plugins lists those installed)"
        raise UserError.one(str(source / CONFIG_OF.get(kind, "")), why, fix)
    return found


def _briefly(reason: str) -> str:
    """Shorten the reason of one model of many: all of them have to fit into a line."""
    return reason if len(reason) <= 120 else f"{reason[:80]}...{reason[-36:]}"


def formats_of(model: Model, kind: str) -> list[WeightFormat]:
    """Return the formats of ``model`` in files of this kind, in order of precedence.

    Raises:
        UserError: its plugin declares a format in files that are not in :data:`FILES`.
    """
    if unknown := [form.files for form in model.formats if form.files not in FILES]:
        why = f"its plugin declares weights in files {unknown[0]!r}, but titan-ckpt reads only {', '.join(FILES)}"
        raise UserError.one(f"model {model.name!r}", why, "correct WeightFormat.files in the plugin, or update titan-ckpt")
    return sorted((form for form in model.formats if form.files == kind), key=lambda form: -form.priority)


def accepting(
    candidates: Sequence[tuple[Model, WeightFormat]], config: Mapping[str, Any], where: str, reasons: list[str]
) -> tuple[Model, WeightFormat, BaseModel] | None:
    """Return the format of the highest priority that accepts ``config``, and the arguments that it returns. Formats of lower
    priority are not called.

    Args:
        reasons: the reasons of those that do not are appended.

    Raises:
        UserError: two of the same priority accept it.
    """
    for _, equal in groupby(sorted(candidates, key=lambda one: -one[1].priority), key=lambda one: one[1].priority):
        found = []
        for model, form in equal:
            try:
                found.append((model, form, read_args(form, config)))
            except ValueError as error:
                reasons.append(f"{model.name}: {' '.join(str(error).split())}")
        if found:
            require_one([(model, form) for model, form, _ in found], where)
            return found[0]
    return None


def preferred(model: Model, forms: Sequence[WeightFormat]) -> WeightFormat | None:
    """Return the first of ``forms`` of ``model``, which are in order of precedence; ``None`` if there is none.

    Raises:
        UserError: the second one has the same priority.
    """
    require_one([(model, form) for form in forms if form.priority == forms[0].priority], f"model {model.name!r}")
    return forms[0] if forms else None


def owner(model: Model) -> str:
    """Return the plugin of ``model`` and its name, for errors that its author must fix."""
    return str(model.define.origin or f"model {model.name!r}")


def require_one(equal: Sequence[tuple[Model, WeightFormat]], where: str) -> None:
    """Require that there are no two formats of the same priority.

    Raises:
        UserError: there are. The message names both.
    """
    if len(equal) > 1:
        names = " and ".join(f"{form.tensors.target} of model {model.name!r}" for model, form in equal[:2])
        why = f"two formats have priority {equal[0][1].priority} for these weights: {names}"
        fix = "give one of them another WeightFormat.priority, or switch its plugin off with [plugins] disable"
        raise UserError.one(where, why, fix)


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
    contents = read_object(index, DOWNLOAD_AGAIN, longest=LONGEST_TABLE, inside=index.parent).get("weight_map")
    if not isinstance(contents, dict) or not all(isinstance(file, str) for file in contents.values()):
        raise UserError.one(str(index), "must contain a weight_map from tensors to files", DOWNLOAD_AGAIN)
    for file in contents.values():
        if not file.endswith(".safetensors") or file != Path(file).name or "\\" in file or "\0" in file:
            raise UserError.one(
                str(index), f"lists {file!r}, which is not a .safetensors file in its folder", "do not use this folder"
            )
    return contents
