"""``[training]`` and ``[validation]``: datasets, batches and sequences."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from titan_torchtitan.keys import EARLY, LAST, LATE, MIDDLE, TORCHTRAIN, Generation
from titan_torchtitan.outcome import ImportOutcome

_DATASETS: Final[dict[str, tuple[str, str | None]]] = {
    "c4": ("c4", None),
    "c4_validation": ("c4_validation", None),
    "c4_test": ("json", "./tests/assets/c4_test"),
    "c4_mini": ("json", "./torchtitan/datasets/c4_mini"),
    "alpaca": ("hub", "tatsu-lab/alpaca"),
    "minipile": ("hub", "JeanKaddour/minipile"),
}
"""TorchTitan's datasets: Titan's name, and the path if it needs one."""
_DEFAULT_DATASET: Final[dict[Generation, str]] = {
    TORCHTRAIN: "alpaca", EARLY: "c4_mini", MIDDLE: "c4_test", LATE: "c4_test", LAST: "c4_test",
}  # fmt: skip


def import_data(outcome: ImportOutcome, installed: Collection[str]) -> None:
    """Import the datasets, the batch and the sequence length.

    Args:
        installed: the datasets of the installed plugins.
    """
    old = outcome.old
    if not old.has("training.dataset"):
        new, _ = _dataset("training", _DEFAULT_DATASET[old.generation], old.get("training.dataset_path"))
        for key, value in new.items():
            outcome.default(key, value)
    _import_dataset(outcome, "training", installed)
    outcome.keep("training.local_batch_size", "training.global_batch_size", "training.seq_len")
    outcome.set("training.dataloader.num_workers", {"data.num_workers": old.get("training.dataloader.num_workers")})
    for section in ("training", "validation"):
        outcome.ignore(
            "Titan's loader reads ahead by data.prefetch steps, and keeps its workers",
            *(f"{section}.dataloader.{name}" for name in ("persistent_workers", "pin_memory", "prefetch_factor")),
        )
    outcome.ignore("validation reads with the workers of training", "validation.dataloader.num_workers")
    _validation(outcome, installed)


def _import_dataset(outcome: ImportOutcome, section: str, installed: Collection[str]) -> None:
    old, key, path_key = outcome.old, f"{section}.dataset", f"{section}.dataset_path"
    if old.has(key):
        name = str(old.get(key))
        if name in _DATASETS:
            outcome.set(key, *_dataset(section, name, old.get(path_key)))
        elif name in installed:
            outcome.keep(key, why="Titan's dataset of this name, or an installed plugin's; compare what it reads")
        elif section == "validation" and not old.get("validation.enable"):
            outcome.ignore("validation is off", key)
        else:
            why = "no dataset of TorchTitan or of an installed plugin: name its files or its repository (docs/data.md)"
            outcome.refuse(key, why, {key: name})
    if old.get(path_key):
        outcome.set(path_key, {path_key: old.get(path_key)})
    outcome.ignore("not set", path_key)


def _dataset(section: str, name: str, path: str | None) -> tuple[dict[str, Any], str]:
    new_name, default_path = _DATASETS[name]
    new: dict[str, Any] = {f"{section}.dataset": new_name}
    if default_path is None:
        return new, ""
    if not path:
        new[f"{section}.dataset_path"] = default_path
        if new_name == "json":
            return new, f"reads the files of {default_path.removeprefix('./')} in TorchTitan's repository"
    return new, "the same files" if new_name == "json" else "streams it from the Hugging Face hub"


def _validation(outcome: ImportOutcome, installed: Collection[str]) -> None:
    old = outcome.old
    enabled = bool(old.get("validation.enable"))
    _import_dataset(outcome, "validation", installed)
    outcome.keep("validation.enable", "validation.freq")
    if enabled:
        if not old.has("validation.dataset"):
            outcome.default("validation.dataset", "c4_validation")
        if not old.has("validation.freq"):
            outcome.default("validation.freq", 10)
    _validation_batches(outcome, enabled)
    seq_len, train_len = old.get("validation.seq_len", 2048), old.get("training.seq_len", 2048)
    if enabled and seq_len != train_len:
        why = f"Titan validates sequences of training.seq_len = {train_len}: losses differ from those on {seq_len} tokens"
        if old.has("validation.seq_len"):
            outcome.refuse("validation.seq_len", why)
        else:
            outcome.note("validation.enable", why)
    outcome.ignore("Titan validates sequences of training.seq_len", "validation.seq_len")


def _validation_batches(outcome: ImportOutcome, enabled: bool) -> None:
    """TorchTitan's validation has a batch of its own. Titan validates global batches of training."""
    old = outcome.old
    steps = old.get("validation.steps", -1)
    local, train_local = old.get("validation.local_batch_size", 8), old.get("training.local_batch_size", 8)
    why = "Titan validates batches of training's size"
    if not enabled or steps < 0 or local == train_local or train_local <= 0:
        outcome.keep("validation.steps")
    elif old.get("training.global_batch_size", -1) > 0:
        outcome.keep("validation.steps", why=f"{why}: adjust the number, which counts global batches of training")
    else:
        batches = max(1, -(-steps * local // train_local))
        outcome.set(
            "validation.steps", {"validation.steps": batches}, f"{why}: as many sequences as {steps} batches of {local}"
        )
    outcome.ignore(f"{why}; validation.steps counts them", "validation.local_batch_size")
