"""The files beside exported weights: ``config.json``, ``generation_config.json`` and the tokenizer's files, which
``transformers`` requires, and the model card, which says which recipe, steps and data the model comes from."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from titan_ckpt.foreign.config import read_args
from titan_ckpt.format.stored import Manifest
from titan_ckpt.format.tokenizer_files import BESIDE, MAIN, files_at, is_beside
from titan_core.api import Registry, Tokenizer, TokenizerContext, UserError, WeightFormat
from titan_core.api.config.secrets import redact_text
from titan_core.toolkit.files import LONGEST_TABLE, read_bytes
from titan_core.toolkit.plain_json import parse_json
from titan_nn.hf_config import within_vocabulary

TOKENIZER_FIX = "pass a tokenizer.json, or a folder that contains one (`titan tokenizer download OWNER/NAME` makes one)"
_IDS = {"bos_token_id": "begin", "eos_token_id": "end"}


def export_config(form: WeightFormat, args: BaseModel, about: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the contents of ``config.json``. If the run started from Hugging Face weights, the entries of their
    ``config.json`` are kept as far as they still describe the model. Ids of tokens that its vocabulary lacks become those of
    the format, or null: libraries look up the row of some."""
    assert form.from_args is not None
    current: dict[str, Any] = form.from_args.call(dict, args)
    original = about.get("hf", {}).get("config", {})
    plain = {key: value for key, value in original.items() if not isinstance(value, dict)}
    candidates = (original, {**original, **current}, {**plain, **current})
    config = next((candidate for candidate in candidates if _describes(form, candidate, args)), current)
    ids = {key: value for key, value in current.items() if key.endswith("_token_id")}
    config = {key: value for key, value in (ids | config).items() if key not in ("torch_dtype", "dtype")}
    for key, value in config.items():
        inside = within_vocabulary(key, value, current.get("vocab_size"))
        if inside != value:
            config[key] = current.get(key) if inside is None else inside
    return with_token_ids({**config, "dtype" if "dtype" in original else "torch_dtype": dtype}, about)


def export_generation_config(about: Mapping[str, Any], vocab_size: object) -> dict[str, Any]:
    """Return the contents of ``generation_config.json``: the ids that begin and, above all, end a generated text or turn; of
    ``vocab_size`` tokens, if that is known."""
    original = about.get("hf", {}).get("generation_config", {})
    config = with_token_ids({key: within_vocabulary(key, value, vocab_size) for key, value in original.items()}, about)
    ends = config.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if missing := [id_ for id_ in about.get("tokenizer", {}).get("turn_end", []) if id_ not in known]:
        config["eos_token_id"] = [*known, *missing] if known else missing[0]
    return config


def with_token_ids(config: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the begin and end ids of the run's tokenizer. Additional ids in ``config`` (e.g. an end of
    turn) are kept."""
    filled = dict(config)
    for key, which in _IDS.items():
        ids = about.get("tokenizer", {}).get(which, [])
        present = filled.get(key)
        known = present if isinstance(present, list) else [present]
        if ids and not set(ids) <= set(known):
            filled[key] = ids[0] if len(ids) == 1 else ids
    return filled


def warn_without_end_id(config: Mapping[str, Any]) -> None:
    """Warn if ``config`` has no id that ends a generated text."""
    if config.get("eos_token_id") is None:
        print(
            "titan: warning: the run's tokenizer has no end-of-text id: generated text ends only at a length limit",
            file=sys.stderr,
        )


def copy_tokenizer(files: Mapping[str, bytes], target: Path) -> None:
    """Write those of a tokenizer's files that ``transformers`` knows: a single file in JSON becomes ``tokenizer.json``."""
    for name, contents in files.items():
        known = name in MAIN or (is_beside(name) and name.endswith((".json", ".txt", ".jinja")))
        if known or (name.endswith(".json") and not set(files) & set(MAIN)):
            file = target / (name if known else MAIN[0])
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(contents)


def given_tokenizer(path: str) -> dict[str, bytes]:
    """Return the files of the tokenizer that ``--tokenizer`` names.

    Raises:
        UserError: there is none, or one of its files leads elsewhere.
    """
    files = files_at(Path(path).expanduser())
    if not files:
        raise UserError.one(path, "there is no tokenizer here", TOKENIZER_FIX)
    return files


def write_tokenizer(about: Mapping[str, Any], path: str | None, target: Path, registry: Registry) -> str | None:
    """Write the files of the run's tokenizer for ``transformers``.

    Args:
        path: of its files in the checkpoint, if there are any.

    Returns:
        Why it has none; ``None`` if they are written.
    """
    model = about.get("config", {}).get("model", {})
    name = model.get("tokenizer")
    component = next((one for one in registry.all(Tokenizer) if one.name == name), None)
    if component is None:
        return f"no installed plugin has the run's tokenizer {name!r}"
    try:
        section = component.config and component.config(**about["config"].get(component.config.section, {}))
        tokenizer = component.build.load()(TokenizerContext(path, section=section))
        files = tokenizer.tokenizer_files()
    except UserError as error:
        return str(error)
    if files is None:
        return f"the run's tokenizer {name!r} cannot be written in the format of Hugging Face"
    for file, contents in files.items():
        (target / Path(file).name).write_text(contents, encoding="utf-8")
    return None


def tokenizer_in(folder: Path) -> dict[str, str]:
    """Return the keys of config section ``model`` that select the tokenizer in ``folder``; none if it has none."""
    return {"tokenizer": "hf", "tokenizer_path": str(folder)} if (folder / MAIN[0]).is_file() else {}


def complete_tokenizer(target: Path, about: Mapping[str, Any]) -> None:
    """Write the config files that ``transformers`` expects beside a ``tokenizer.json``, if they are missing.

    Raises:
        UserError: the ``tokenizer.json`` is invalid.
    """
    file, config = target / MAIN[0], target / BESIDE[0]
    if not file.is_file() or config.is_file():
        return
    texts = _texts(file)
    ids = about.get("tokenizer", {})
    first = {"bos_token": ids.get("begin", [])[:1], "eos_token": ids.get("end", [])[:1]}
    marks = {key: texts[id_] for key, key_ids in first.items() for id_ in key_ids if id_ in texts}
    contents = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **marks}
    write_json(config, contents)
    if not (target / BESIDE[1]).is_file():
        write_json(target / BESIDE[1], marks)


def write_json(file: Path, contents: Mapping[str, Any]) -> None:
    """Write JSON in the format of ``transformers``."""
    file.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _describes(form: WeightFormat, config: Mapping[str, Any], args: BaseModel) -> bool:
    try:
        return bool(config) and read_args(form, config) == args
    except ValueError:
        return False


def _texts(file: Path) -> dict[int, str]:
    """Return the tokens of a ``tokenizer.json`` by id."""
    try:
        contents = parse_json(read_bytes(file, longest=LONGEST_TABLE))
        added = {int(token["id"]): str(token["content"]) for token in contents.get("added_tokens") or ()}
        vocab = contents["model"].get("vocab") or {}
        pairs = vocab.items() if isinstance(vocab, dict) else ((piece[0], number) for number, piece in enumerate(vocab))
        return {**{int(number): str(text) for text, number in pairs}, **added}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UserError.one(
            str(file), f"is not a valid tokenizer.json: {error}", "select another one with --tokenizer"
        ) from None


_DATA = ("dataset", "dataset_path")


def write_card(target: Path, manifest: Manifest) -> None:
    """Write ``README.md``, with front matter in YAML. Local files are named without their folders."""
    (target / "README.md").write_text(card(manifest), encoding="utf-8")


def card(manifest: Manifest) -> str:
    """Return the text of the card of ``manifest``'s model."""
    about = manifest.about
    config = about.get("config", {})
    training, data = config.get("training", {}), config.get("data", {})
    entries = data.get("mixture") or [{key: training.get(key) for key in _DATA}]
    rows = {
        "Model": about.get("model"),
        "Recipe": config.get("job", {}).get("description"),
        "Steps": manifest.step,
        "Tokens": manifest.state.get("tokens_seen"),
        "Sequence length": training.get("seq_len"),
        "Global batch": about.get("global_batch_size"),
        "Seed": training.get("seed"),
        "Optimizer": config.get("optimizer", {}).get("name"),
        "Tokenizer": config.get("model", {}).get("tokenizer"),
        "Data": ", ".join(filter(None, map(_data, entries))),
        "torch": about.get("torch"),
    }
    table = "\n".join(f"| {key} | {_escaped(value)} |" for key, value in rows.items() if value not in (None, ""))
    tags = json.dumps(["titan", str(about.get("model_name"))])  # JSON is YAML
    front = f"library_name: transformers\npipeline_tag: text-generation\ntags: {tags}"
    title = _escaped(about.get("model") or "A model")
    return f"---\n{front}\n---\n\n# {title}\n\nTrained with Titan.\n\n| | |\n| --- | --- |\n{table}\n"


def _data(entry: dict[str, Any]) -> str:
    """Return the dataset of ``entry`` and its path: a name on the hub in full, of a local path the last part only."""
    path = str(entry.get("dataset_path") or "")
    local = path.startswith(("/", "~", ".")) or Path(path).exists()
    shown = Path(path).name if local else redact_text(path)
    weight = f" ({entry['weight']:g})" if isinstance(entry.get("weight"), int | float) else ""
    return f"{entry.get('dataset') or 'default'}{f' {shown}' if shown else ''}{weight}"


def _escaped(value: Any) -> str:
    """Return ``value`` as the text of one cell of a table, in which nothing is markup."""
    text = " ".join(redact_text(str(value)).split())
    return "".join(f"\\{character}" if character in "\\`*_[]<>|#!&~$" else character for character in text)
