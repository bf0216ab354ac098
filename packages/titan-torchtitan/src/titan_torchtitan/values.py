"""Keys whose value decides what becomes of them (``by = "values.py"`` in ``rules.toml``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from titan_core.api import UserError
from titan_core.toolkit.text import show
from titan_torchtitan.outcome import ImportOutcome

_LLAMA: Final = "llama3"
_EXPERIMENT = re.compile(r"(?:\w+\.)?llama3(?:_ft)?")
"""Names under which TorchTitan's experiments train Llama 3 by other means."""
_DOCUMENT_MASK = re.compile(r"_(?:flex|varlen)(?:_(?:attn|flash|triton))?$")
"""Ending of flavors that restrict attention to documents; it may name the kernel."""
_SIZES: Final = ("8B", "70B", "405B")
_DEBUG_MODEL: Final = {
    "dim": 256, "n_layers": 6, "n_heads": 16, "n_kv_heads": 16, "ffn_dim": 768, "vocab_size": 2048, "max_seq_len": 131_072,
    "rope_theta": 500_000.0, "norm_eps": 1e-5, "tie_embeddings": False, "rope_scaling.factor": 8.0,
}  # fmt: skip
"""TorchTitan's debug model, as arguments that replace those of Titan's."""
_DATASETS: Final[dict[str, tuple[str, str | None]]] = {
    "c4": ("c4", None),
    "c4_validation": ("c4_validation", None),
    "c4_test": ("json", "./tests/assets/c4_test"),
}
"""TorchTitan's datasets: Titan's name, and the path in TorchTitan's repository if it needs one."""
_SCHEDULES: Final = {
    "gpipe": "GPipe", "1f1b": "1F1B", "loopedbfs": "LoopedBFS", "interleaved1f1b": "Interleaved1F1B",
    "flexibleinterleaved1f1b": "Interleaved1F1B", "interleavedzerobubble": "InterleavedZeroBubble",
    "zbvzerobubble": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip
"""Torch accepts any case; it merged FlexibleInterleaved1F1B into Interleaved1F1B."""
_FLOAT8, _MX = "quantize.linear.float8", "quantize.linear.mx"
_EXPERTS: Final = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
_MX_RECIPES: Final[dict[str, dict[str, Any]]] = {
    "mxfp8_cublas": {"mx.recipe_name": "mxfp8_floor"},
    "mxfp8_cublas_rceil": {"mx.recipe_name": "mxfp8_rceil"},
    "mxfp8_rceil": {"mx.recipe_name": "mxfp8_rceil"},
    "mxfp8_rceil_wgrad_with_hp": {"mx.recipe_name": "mxfp8_rceil_wgrad_with_hp"},
    "mxfp8_emulated": {"mx.recipe_name": "mxfp8_floor", "mx.emulate": True},
}
"""torchao's recipes; "cublas" names the kernel, and rounding is down unless the name says otherwise."""
_HEAD: Final = "output"
_GATHER: Final = f"{_FLOAT8}.enable_fsdp_float8_all_gather"


def _model_name(outcome: ImportOutcome, key: str, name: str) -> None:
    if name in outcome.models and name != _LLAMA:
        outcome.set(key, {key: name}, "the model of an installed plugin; compare its arguments")
    elif _EXPERIMENT.fullmatch(name):
        why = "" if name == _LLAMA else "the same model; the experiment's way to train it has no equivalent"
        outcome.set(key, {key: _LLAMA}, why)
    else:
        why = f"is not among the models of the installed plugins ({', '.join(outcome.models) or 'none'})"
        fix = 'install a plugin with this model, or write one: docs/plugins.md, "A model"'
        raise UserError.one(f"{outcome.old.source}: {key} = {show(name)}", why, fix)


def _model_flavor(outcome: ImportOutcome, key: str, flavor: str) -> None:
    size = _DOCUMENT_MASK.sub("", flavor)
    masked = {"data.document_mask": True} if size != flavor else {}
    why = "attends within documents; positions also start at 0 in each" if masked else ""
    if not _EXPERIMENT.fullmatch(outcome.asked["model.name"]):
        outcome.set(key, {key: flavor})
    elif size == "debugmodel":
        args = {f"model.args.{name}": value for name, value in _DEBUG_MODEL.items()}
        outcome.set(key, {key: "debug", **args, **masked}, f"TorchTitan's shape{why and '; '}{why}")
    elif size in _SIZES:
        outcome.set(key, {key: size, **masked}, why)
    else:
        why = f"not a size of TorchTitan: describe it by a size of Titan ({', '.join(_SIZES)}) and [model.args]"
        outcome.refuse(key, why, {key: size, **masked})


def _tokenizer(outcome: ImportOutcome, key: str, path: str) -> None:
    outcome.set(key, {"model.tokenizer": "hf", "model.tokenizer_path": path}, "reads the folder's tokenizer.json")


def _converters(outcome: ImportOutcome, key: str, names: list[str]) -> None:
    new = {f"{name.rpartition('.')[2]}.enable": True for name in (_FLOAT8, _MX) if name in names}
    unknown = [repr(name) for name in names if name not in (_FLOAT8, _MX, *_EXPERTS)]
    if unknown:
        outcome.refuse(key, f"Titan has no {', '.join(unknown)}: a plugin can convert layers (docs/plugins.md)", new)
    elif new or not names:
        outcome.set(key, new or {"float8.enable": False})
    else:
        outcome.ignore(key, "the model has no experts")


def _gathers(outcome: ImportOutcome) -> bool:
    """Whether weights are gathered in float8, which needs one scale per weight."""
    recipe = outcome.asked.get(f"{_FLOAT8}.recipe_name", "")
    return bool(outcome.asked.get(_GATHER)) and recipe in ("", "tensorwise")


def _float8_gather(outcome: ImportOutcome, key: str, value: bool) -> None:
    if value and not _gathers(outcome):
        outcome.ignore(key, "no effect with a recipe_name that has many scales per weight")
    else:
        outcome.set(key, {"float8.enable_fsdp_float8_all_gather": value})


def _float8_precompute(outcome: ImportOutcome, key: str, value: bool) -> None:
    if value and not _gathers(outcome):
        outcome.ignore(key, "no effect unless weights are gathered in float8")
    else:
        outcome.set(key, {"float8.precompute_float8_dynamic_scale_for_fsdp": value})


def _filters(outcome: ImportOutcome, key: str, names: list[str]) -> None:
    """Titan keeps the head in high precision unless ``convert_head`` is set; TorchTitan converted it unless a filter matched
    its name."""
    section = key.split(".")[-2]
    new: dict[str, Any] = {f"{section}.filter_fqns": names} if names else {}
    if any(name in _HEAD for name in names):
        outcome.set(key, new)
    else:
        outcome.set(key, {f"{section}.convert_head": True, **new}, "TorchTitan converts the head unless a filter names it")


def _mx_recipe(outcome: ImportOutcome, key: str, name: str) -> None:
    if name in _MX_RECIPES:
        outcome.set(key, _MX_RECIPES[name], "TorchTitan's mxfp8_cublas rounds scales down" if name == "mxfp8_cublas" else "")
    else:
        outcome.refuse(key, "Titan has MXFP8 only, not this recipe of torchao: set mx.recipe_name")


def _dataset(outcome: ImportOutcome, key: str, name: str) -> None:
    if name in _DATASETS:
        new, path = _DATASETS[name]
        if path is None or outcome.asked.get(f"{key}_path"):
            outcome.set(key, {key: new})
        else:
            why = f"reads the files of {path.removeprefix('./')} in TorchTitan's repository"
            outcome.set(key, {key: new, f"{key}_path": path}, why)
    elif name in outcome.datasets:
        outcome.set(key, {key: name}, "Titan's dataset of this name, or an installed plugin's; compare what it reads")
    else:
        why = "no dataset of TorchTitan or of an installed plugin: name its files or its repository (docs/data.md)"
        outcome.refuse(key, why, {key: name})


def _validation_steps(outcome: ImportOutcome, key: str, steps: int) -> None:
    """TorchTitan's validation has a batch of its own. Titan validates global batches of training."""
    asked = outcome.asked
    local, train_local = asked.get("validation.local_batch_size", 8), asked.get("training.local_batch_size", 8)
    why = "Titan validates batches of training's size"
    if not asked.get("validation.enable") or steps < 0 or local == train_local or train_local <= 0:
        outcome.set(key, {key: steps})
    elif asked.get("training.global_batch_size", -1) > 0:
        outcome.set(key, {key: steps}, f"{why}: adjust the number, which counts global batches of training")
    else:
        batches = max(1, -(-steps * local // train_local))
        outcome.set(key, {key: batches}, f"{why}: as many sequences as {steps} batches of {local}")


def _validation_length(outcome: ImportOutcome, key: str, length: int) -> None:
    train_length = outcome.asked.get("training.seq_len", 2048)
    why = f"Titan validates sequences of training.seq_len = {train_length}"
    if length == train_length:
        outcome.ignore(key, why)
    elif key in outcome.old.given:
        outcome.refuse(key, f"{why}: losses differ from those on {length} tokens")
    else:
        outcome.set(key, {"validation.enable": True}, f"{why}: losses differ from those on TorchTitan's default of {length}")


def _optimizer(outcome: ImportOutcome, key: str, name: str) -> None:
    if name in ("Adam", "AdamW"):
        outcome.set(key, {key: name})
    elif name in outcome.optimizers:
        outcome.set(key, {key: name}, "the optimizer of an installed plugin; compare its keys")
    else:
        why = "no optimizer of TorchTitan or of an installed plugin: set Adam or AdamW, or write a plugin (docs/plugins.md)"
        outcome.refuse(key, why, {key: name})


def _steps(outcome: ImportOutcome, key: str, steps: int) -> None:
    total = outcome.asked.get("lr_scheduler.total_steps", steps)
    if total > steps:
        new = {"training.steps": total, "training.stop_at_step": steps}
        outcome.set(key, new, "the schedule is that of lr_scheduler.total_steps, and the run ends before")
    else:
        outcome.set(key, {key: steps})


def _total_steps(outcome: ImportOutcome, key: str, total: int) -> None:
    if total < outcome.asked["training.steps"]:
        outcome.refuse(key, "Titan's schedule ends with training.steps: set both to one number")
    else:
        outcome.set(key, {"training.steps": total})


def _schedule(outcome: ImportOutcome, key: str, name: str) -> None:
    schedule = _SCHEDULES.get(name.replace("_", "").lower())
    if outcome.asked.get(f"{key}_csv"):
        outcome.ignore(key, "the CSV file is the schedule")
    elif schedule is not None:
        outcome.set(key, {key: schedule})
    else:
        outcome.refuse(
            key, f"not a schedule of Titan, which has {', '.join(dict.fromkeys(_SCHEDULES.values()))}", {key: name}
        )


def _model_parts(outcome: ImportOutcome, key: str, parts: Any) -> None:
    """Titan names where stages begin; TorchTitan lists the modules of each."""
    split_points = "parallelism.pipeline_parallel_split_points"
    lists = isinstance(parts, list) and all(isinstance(part, list) and part for part in parts)
    modules = [module for part in parts for module in part] if lists else []
    blocks = [f"layers.{index}" for index in range(len(modules) - 3)]
    if modules == ["tok_embeddings", *blocks, "norm", "output"]:
        new = {split_points: [part[0] for part in parts[1:]]}
        outcome.set(key, new, "the first module of each stage but the first")
    else:
        outcome.refuse(key, f"not lists of modules in the model's order: set {split_points}")


def _dump_folder(outcome: ImportOutcome, key: str, folder: str) -> None:
    if str(PurePosixPath(folder)) == "outputs":
        why = "a run has a directory of its own: outputs/<name of the recipe>, unless job.dump_folder is set"
        outcome.ignore(key, why)
    else:
        outcome.set(key, {key: folder})


def _folder(outcome: ImportOutcome, key: str, folder: str) -> None:
    """A folder for files of the run, which Titan keeps below the run's directory."""
    path = PurePosixPath(folder)
    if path.is_absolute() or ".." in path.parts:
        outcome.refuse(key, "must be below the run's directory")
    else:
        outcome.set(key, {key: folder})


def _initial_load_path(outcome: ImportOutcome, key: str, path: str) -> None:
    in_hf = outcome.asked.get("checkpoint.initial_load_in_hf")
    outcome.set(key, {key: path}, "" if in_hf else "convert a checkpoint of TorchTitan first: `titan checkpoint convert`")


def _initial_load_in_hf(outcome: ImportOutcome, key: str, in_hf: bool) -> None:
    path = "checkpoint.initial_load_path"
    if in_hf and not outcome.asked.get(path):
        outcome.set(key, {path: outcome.asked["model.hf_assets_path"]}, "the weights in model.hf_assets_path")
    else:
        outcome.ignore(key, "Titan recognises the format of the folder")


def _excluded(outcome: ImportOutcome, key: str, names: list[str]) -> None:
    """TorchTitan excludes parts of a checkpoint; Titan excludes tensors, by patterns."""
    tensors = [f"{name}.*" for name in names if name in ("model", "optimizer")]
    others = [name for name in names if name not in ("model", "optimizer")]
    if others:
        why = f"Titan excludes tensors only, not {', '.join(others)}: to start anew from weights, set initial_load_path"
        outcome.refuse(key, why, {key: tensors} if tensors else None)
    elif names:
        outcome.set(key, {key: tensors}, "patterns of tensors")
    else:
        outcome.ignore(key, "requests nothing")


def _trace_buffer(outcome: ImportOutcome, key: str, size: int) -> None:
    outcome.set(key, {key: size} if size > 0 else {"comm.flight_recorder": False})


DECIDE: Final[Mapping[str, Callable[[ImportOutcome, str, Any], None]]] = {
    "model.name": _model_name, "model.flavor": _model_flavor, "model.hf_assets_path": _tokenizer,
    "model.converters": _converters, _GATHER: _float8_gather,
    f"{_FLOAT8}.precompute_float8_dynamic_scale_for_fsdp": _float8_precompute, f"{_FLOAT8}.filter_fqns": _filters,
    f"{_MX}.filter_fqns": _filters, f"{_MX}.recipe_name": _mx_recipe,
    "training.dataset": _dataset, "training.steps": _steps, "lr_scheduler.total_steps": _total_steps,
    "validation.dataset": _dataset, "validation.steps": _validation_steps, "validation.seq_len": _validation_length,
    "optimizer.name": _optimizer, "parallelism.pipeline_parallel_schedule": _schedule,
    "parallelism.module_fqns_per_model_part": _model_parts, "checkpoint.initial_load_path": _initial_load_path,
    "checkpoint.initial_load_in_hf": _initial_load_in_hf, "checkpoint.exclude_from_loading": _excluded,
    "job.dump_folder": _dump_folder, "metrics.save_tb_folder": _folder, "profiling.save_traces_folder": _folder,
    "profiling.save_memory_snapshot_folder": _folder, "comm.save_traces_folder": _folder,
    "comm.trace_buf_size": _trace_buffer,
}  # fmt: skip
"""The function of each key."""
