"""Which files of a repository make up its tokenizer, and its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titan_core.api import UserError
from titan_core.toolkit.plain_json import read_object
from titan_core.toolkit.text import shorten
from titan_data.hub.repository import HubFile, Repository

TOKENIZER_JSON, TOKENIZER_MODEL = "tokenizer.json", "tokenizer.model"
TOKENIZER_FILES = (
    TOKENIZER_JSON, TOKENIZER_MODEL, "tokenizer.model.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Names of the files of a tokenizer."""
ORIGINAL = f"original/{TOKENIZER_MODEL}"
"""Where Meta's repositories keep the ranks of Llama's tokenizer."""
INDEX, WEIGHTS, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors", INDEX, CONFIG, "generation_config.json")
"""Patterns of the names of files that a program would read as part of a model."""

_NOTICES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "USE_POLICY.md", "NOTICE")
_PICKLES = (".bin", ".pth", ".pt", ".pkl")
_OTHERS = (".gguf", ".h5", ".msgpack", ".onnx", ".npz")


def tokenizer_files(repository: Repository) -> tuple[HubFile, ...]:
    """Return the files of the repository's tokenizer.

    Raises:
        UserError: it has none in a format that Titan reads.
    """
    found = _named(repository, TOKENIZER_FILES)
    names = {file.name for file in found}
    if TOKENIZER_MODEL not in names and ORIGINAL in repository.files:
        found += (repository.files[ORIGINAL],)
    if not {TOKENIZER_JSON, TOKENIZER_MODEL} & {file.name for file in found}:
        has = f" (it has {', '.join(sorted(names))})" if names else ""
        why = f"has no tokenizer that Titan reads, neither {TOKENIZER_JSON} nor {TOKENIZER_MODEL}{has}"
        raise UserError.one(repository.where, why, "choose another repository, or convert the tokenizer with transformers")
    return found


def model_files(repository: Repository, fetch: Callable[[HubFile], Path]) -> tuple[HubFile, ...]:
    """Return the safetensors files of the repository's model, its configs and its tokenizer.

    Args:
        fetch: downloads a file and returns its path; used for the index of the weights.

    Raises:
        UserError: the repository contains no model, or none in safetensors.
    """
    if CONFIG not in repository.files:
        adapter = "adapter_config.json" in repository.files
        why = "contains an adapter (LoRA), not a whole model" if adapter else f"contains no {CONFIG}, so it is not a model"
        raise UserError.one(repository.where, why, "choose the repository of a model in the format of transformers")
    weights = _weights(repository, fetch)
    tokenizer = _named(repository, TOKENIZER_FILES)
    return (*weights, *tokenizer, *_named(repository, (*_NOTICES, "generation_config.json", CONFIG)))


def _weights(repository: Repository, fetch: Callable[[HubFile], Path]) -> tuple[HubFile, ...]:
    files = repository.files
    if INDEX in files:
        names = _listed(read_object(fetch(files[INDEX]), "choose another repository"))
        if odd := sorted(name for name in names if "/" in name or not name.endswith(".safetensors")):
            why = f"{INDEX} lists {shorten(', '.join(odd))}, which is not a .safetensors file beside it"
            raise UserError.one(repository.where, why, "choose another repository")
        missing = sorted(names - files.keys())
        if missing or not names:
            why = f"{INDEX} lists {shorten(', '.join(missing)) or 'no files'}" + (", which do not exist" if missing else "")
            raise UserError.one(repository.where, why, "choose another revision with --revision")
        return (*_named(repository, sorted(names)), files[INDEX])
    if WEIGHTS in files:
        return (files[WEIGHTS],)
    top = sorted(path for path in files if "/" not in path)
    safe = [path for path in top if path.endswith(".safetensors")]
    if len(safe) == 1:
        return (files[safe[0]],)
    if safe:
        why = f"contains several safetensors files and no {INDEX}: {shorten(', '.join(safe))}"
        raise UserError.one(repository.where, why, "choose another repository")
    if pickles := [path for path in top if path.endswith(_PICKLES)]:
        why = f"has only pickled weights ({shorten(', '.join(pickles))}), and reading a pickle runs the code in it"
        raise UserError.one(repository.where, why, "choose a repository or a --revision with safetensors weights")
    others = [path for path in top if path.endswith(_OTHERS)]
    why = "has no safetensors weights" + (f" (only {shorten(', '.join(others))})" if others else "")
    raise UserError.one(repository.where, why, "choose a repository with safetensors weights")


def _listed(index: Mapping[str, Any]) -> set[str]:
    names = index.get("weight_map")
    return {str(name) for name in names.values()} if isinstance(names, dict) else set()


def _named(repository: Repository, names: tuple[str, ...] | list[str]) -> tuple[HubFile, ...]:
    return tuple(repository.files[name] for name in names if name in repository.files)
