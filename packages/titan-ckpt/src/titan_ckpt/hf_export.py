"""What an export needs beside its weights to be used by ``transformers``: ``config.json``, ``generation_config.json`` and
the tokenizer's files."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from titan_ckpt.foreign_checks import read_args
from titan_core.api.errors import UserError
from titan_core.api.weights import WeightFormat

_TOKENIZER = ("tokenizer.json", "tokenizer.model")
_BESIDE = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_IDS = {"bos_token_id": "begin", "eos_token_id": "end"}


def export_config(form: WeightFormat, args: BaseModel, about: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Contents of ``config.json``. Where the weights came from Hugging Face's format, what their own said, as far as it
    still describes the model."""
    assert form.from_args is not None
    mine = form.from_args.load()(args)
    theirs = about.get("hf", {}).get("config", {})
    plain = {key: value for key, value in theirs.items() if not isinstance(value, dict)}
    config = next((one for one in (theirs, {**theirs, **mine}, {**plain, **mine}) if _describes(form, one, args)), mine)
    config = {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")}
    return with_token_ids({**config, "dtype" if "dtype" in theirs else "torch_dtype": dtype}, about)


def export_generation_config(about: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of ``generation_config.json``: where a text that is generated begins and, above all, ends."""
    return with_token_ids(about.get("hf", {}).get("generation_config", {}), about)


def with_token_ids(config: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the ids by which the run's tokenizer marks a text. Further ids that a config already has (an end of
    turn) stay."""
    filled = dict(config)
    for key, which in _IDS.items():
        ids = about.get("tokenizer", {}).get(which, [])
        there = filled.get(key)
        known = there if isinstance(there, list) else [there]
        if ids and not set(ids) <= set(known):
            filled[key] = ids[0] if len(ids) == 1 else ids
    return filled


def warn_of_no_end(config: Mapping[str, Any]) -> None:
    """Say that texts will not end by themselves, if nothing says how."""
    if config.get("eos_token_id") is None:
        print(
            "titan: warning: the run's tokenizer marks no end of a text: generation by this export does not stop by itself",
            file=sys.stderr,
        )


def copy_tokenizer(given: Path, target: Path) -> bool:
    """Copy a tokenizer, a file or the folder that holds one, with the files that belong to it; whether there is one."""
    folder = given if given.is_dir() else given.parent
    found = [folder / name for name in _TOKENIZER if (folder / name).is_file()] if given.is_dir() else []
    if given.is_file():
        found = [given]
    for file in found:
        known = file.name in _TOKENIZER
        shutil.copy(file, target / (file.name if known or file.suffix != ".json" else _TOKENIZER[0]))
    if found:
        for name in _BESIDE:
            if (folder / name).is_file():
                shutil.copy(folder / name, target / name)
    return bool(found)


def complete_tokenizer(target: Path, about: Mapping[str, Any]) -> None:
    """Write the config files that ``transformers`` looks for beside a ``tokenizer.json``, where there are none.

    Raises:
        UserError: the ``tokenizer.json`` is none.
    """
    file, config = target / _TOKENIZER[0], target / _BESIDE[0]
    if not file.is_file() or config.is_file():
        return
    texts = _texts(file)
    ids = about.get("tokenizer", {})
    first = {"bos_token": ids.get("begin", [])[:1], "eos_token": ids.get("end", [])[:1]}
    marks = {key: texts[one] for key, of_key in first.items() for one in of_key if one in texts}
    contents = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **marks}
    write_json(config, contents)
    if not (target / _BESIDE[1]).is_file():
        write_json(target / _BESIDE[1], marks)


def write_json(file: Path, contents: Mapping[str, Any]) -> None:
    """As ``transformers`` writes it."""
    file.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _describes(form: WeightFormat, config: Mapping[str, Any], args: BaseModel) -> bool:
    try:
        return bool(config) and read_args(form, config) == args
    except ValueError:
        return False


def _texts(file: Path) -> dict[int, str]:
    """The tokens of a ``tokenizer.json`` by id."""
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
        added = {int(one["id"]): str(one["content"]) for one in contents.get("added_tokens") or ()}
        vocab = contents["model"].get("vocab") or {}
        pairs = vocab.items() if isinstance(vocab, dict) else ((piece[0], number) for number, piece in enumerate(vocab))
        return {**{int(number): str(text) for text, number in pairs}, **added}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UserError.one(str(file), f"is no tokenizer.json: {error}", "name another by --tokenizer") from None
