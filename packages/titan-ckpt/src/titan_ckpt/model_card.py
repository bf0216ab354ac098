"""The model card of an export: which recipe, steps and data a model comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titan_ckpt.stored import Manifest
from titan_core.toolkit.secrets import redact_text

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
    return "".join(f"\\{character}" if character in "\\`*_[]<>|#!" else character for character in text)
