"""``[job]``, ``[checkpoint]``, ``[metrics]``, ``[profiling]``, ``[comm]`` and sections without an equivalent."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from titan_torchtitan.keys import EARLY, LATE, TORCHTRAIN
from titan_torchtitan.outcome import ImportOutcome

_PLUGIN = "Titan finds code by entry points: write a plugin (docs/plugins.md)"
_COMMON_FOLDER: Final = ("outputs", "torchtitan/outputs", "torchtrain/outputs")
"""Folders that TorchTitan's recipes share; a Titan run needs a directory of its own."""


def import_saving(outcome: ImportOutcome) -> None:
    """Import where and what a run writes."""
    _job(outcome)
    _checkpoint(outcome)
    _metrics(outcome)
    _profiling(outcome)
    _comm(outcome)
    _fault_tolerance(outcome)
    outcome.ignore(
        "`titan config check` and `titan job show` need no GPU and train nothing",
        "memory_estimation.enable", "memory_estimation.disable_fake_mode",
    )  # fmt: skip
    for key in ("experimental.custom_import", "job.custom_config_module"):
        if outcome.old.get(key):
            outcome.refuse(key, _PLUGIN)
        outcome.ignore("not set", key)


def _job(outcome: ImportOutcome) -> None:
    old = outcome.old
    outcome.keep("job.description")
    folder = str(old.get("job.dump_folder", ""))
    if str(PurePosixPath(folder)) in _COMMON_FOLDER or not folder:
        outcome.ignore(
            "a run has a directory of its own: outputs/<name of the recipe>, unless job.dump_folder is set",
            "job.dump_folder",
        )
    outcome.keep("job.dump_folder")
    outcome.ignore("of TorchTitan's own tests and command line", "job.config_file", "job.use_for_integration_test")
    outcome.ignore(
        "`titan config show` prints the config, and every run saves it",
        "job.print_config", "job.save_config_file", "debug.print_config", "debug.save_config_file",
    )  # fmt: skip


def _checkpoint(outcome: ImportOutcome) -> None:
    old = outcome.old
    enabled = bool(old.get("checkpoint.enable"))
    folder = old.get("checkpoint.folder", "")
    if not old.has("checkpoint.enable") and old.generation == TORCHTRAIN and folder:
        enabled = True
        outcome.set(
            "checkpoint.folder", {"checkpoint.enable": True, "checkpoint.folder": folder}, "a folder enabled checkpoints"
        )
    if not folder:
        outcome.ignore("not set", "checkpoint.folder")
    in_seconds = not old.get("checkpoint.interval_type", "steps").startswith("step")
    if not enabled:
        names = ("interval_type", "load_only", "initial_load_in_hf_quantized", *(["interval"] if in_seconds else []))
        outcome.ignore("checkpoints are off", *(f"checkpoint.{name}" for name in names))
    elif in_seconds:
        why = "Titan counts steps: set checkpoint.interval to the steps of that time"
        outcome.refuse("checkpoint.interval_type", why)
        outcome.refuse("checkpoint.interval", why)
    outcome.ignore("Titan counts steps", "checkpoint.interval_type")
    same = (
        "enable", "folder", "interval", "enable_first_step_checkpoint", "async_mode", "keep_latest_k", "load_step",
        "initial_load_model_only", "last_save_model_only", "export_dtype",
    )  # fmt: skip
    outcome.keep(*(f"checkpoint.{name}" for name in same))
    if enabled and old.generation <= EARLY and not old.has("checkpoint.keep_latest_k"):
        outcome.default("checkpoint.keep_latest_k", 0, "TorchTitan kept all")
    if enabled and old.generation >= LATE and not old.has("checkpoint.last_save_model_only"):
        outcome.default("checkpoint.last_save_model_only", True)
    if enabled and old.generation == TORCHTRAIN and not old.has("checkpoint.interval"):
        outcome.default("checkpoint.interval", 3600 if "training.checkpoint_folder" in old.names() else 500)
    _initial_load(outcome)
    _excluded(outcome, enabled)
    outcome.ignore("initial weights depend on training.seed only, on any mesh", "checkpoint.create_seed_checkpoint")
    if old.get("checkpoint.last_save_in_hf"):
        outcome.ignore("export afterwards: `titan checkpoint convert CHECKPOINT FOLDER`", "checkpoint.last_save_in_hf")
    outcome.ignore("off", "checkpoint.last_save_in_hf")
    if old.get("checkpoint.load_only"):
        outcome.refuse(
            "checkpoint.load_only", "a run of Titan that loads checkpoints also saves them, at the latest at its end"
        )
    outcome.ignore("off", "checkpoint.load_only")
    outcome.ignore("the position in the data is always saved", "checkpoint.enable_ft_dataloader_checkpoints")


def _initial_load(outcome: ImportOutcome) -> None:
    old = outcome.old
    path, in_hf = old.get("checkpoint.initial_load_path"), old.get("checkpoint.initial_load_in_hf")
    if path:
        why = "" if in_hf else "a checkpoint of TorchTitan must be converted first: `titan checkpoint convert`"
        outcome.set("checkpoint.initial_load_path", {"checkpoint.initial_load_path": path}, why)
    elif in_hf and old.get("model.hf_assets_path"):
        new = {"checkpoint.initial_load_path": old.get("model.hf_assets_path")}
        outcome.set("checkpoint.initial_load_in_hf", new, "the weights in model.hf_assets_path")
    outcome.ignore("not set", "checkpoint.initial_load_path")
    outcome.ignore("Titan recognises the format of the folder", "checkpoint.initial_load_in_hf")
    if old.get("checkpoint.initial_load_in_hf_quantized"):
        outcome.refuse("checkpoint.initial_load_in_hf_quantized", "Titan reads weights that are not quantised")
    outcome.ignore("off", "checkpoint.initial_load_in_hf_quantized")


def _excluded(outcome: ImportOutcome, enabled: bool) -> None:
    """TorchTitan excludes parts of a checkpoint; Titan excludes tensors, by patterns."""
    key = "checkpoint.exclude_from_loading"
    names = outcome.old.get(key, [])
    tensors = [f"{name}.*" for name in names if name in ("model", "optimizer")]
    others = [name for name in names if name not in ("model", "optimizer")]
    if others and not enabled:
        outcome.ignore("checkpoints are off", key)
    elif others:
        why = f"Titan excludes tensors only, not {', '.join(others)}: to start anew from weights, set initial_load_path"
        outcome.refuse(key, why)
        if tensors:
            outcome.default(key, tensors, key)
    elif names:
        outcome.set(key, {key: tensors}, "patterns of tensors")
    outcome.ignore("not set", key)


def _metrics(outcome: ImportOutcome) -> None:
    old = outcome.old
    outcome.keep("metrics.log_freq", "metrics.enable_tensorboard", "metrics.enable_wandb")
    _folder(outcome, "metrics.save_tb_folder")
    if old.get("metrics.enable_wandb"):
        outcome.default("metrics.wandb_project", "torchtitan", "TorchTitan's default; it read the variable WANDB_PROJECT")
    outcome.ignore("set the variable NO_COLOR to switch colours off", "metrics.disable_color_printing")
    outcome.ignore("rank 0 logs figures of the whole job", "metrics.save_for_all_ranks")


def _profiling(outcome: ImportOutcome) -> None:
    old = outcome.old
    outcome.keep(
        *(f"profiling.{name}" for name in (
            "enable_profiling", "profile_freq", "profiler_active", "profiler_warmup", "enable_memory_snapshot",
        ))
    )  # fmt: skip
    _folder(outcome, "profiling.save_traces_folder")
    _folder(outcome, "profiling.save_memory_snapshot_folder")
    outcome.set("profiling.profile_ranks", {"profiling.ranks": old.get("profiling.profile_ranks")})
    outcome.set("profiling.profile_with_stack", {"profiling.with_stack": old.get("profiling.profile_with_stack")})
    on = old.get("profiling.enable_profiling") or old.get("profiling.enable_memory_snapshot")
    if on and not old.has("profiling.profile_freq"):
        outcome.default("profiling.profile_freq", 10)


def _folder(outcome: ImportOutcome, key: str) -> None:
    """A folder for files of the run, which Titan keeps below the run's directory."""
    path = PurePosixPath(str(outcome.old.get(key, "")))
    if path.is_absolute() or ".." in path.parts:
        outcome.refuse(key, "must be below the run's directory")
    if not path.parts:
        outcome.ignore("not set", key)
    outcome.keep(key)


def _comm(outcome: ImportOutcome) -> None:
    old = outcome.old
    outcome.keep("comm.init_timeout_seconds", "comm.train_timeout_seconds")
    if old.get("comm.trace_buf_size", 1) > 0:
        outcome.keep("comm.trace_buf_size")
    else:
        outcome.set("comm.trace_buf_size", {"comm.flight_recorder": False})
    _folder(outcome, "comm.save_traces_folder")
    outcome.ignore("Titan names the files by rank", "comm.save_traces_file_prefix")
    if old.get("comm.mode", "default") != "default":
        outcome.ignore("a dry run: use `titan config check` and `titan job show`, which need no GPU", "comm.mode")
    outcome.ignore("ranks communicate", "comm.mode")


def _fault_tolerance(outcome: ImportOutcome) -> None:
    names = [key for key in outcome.old.given if key.startswith("fault_tolerance.")]
    if outcome.old.get("fault_tolerance.enable"):
        for key in names:
            outcome.refuse(
                key,
                "Titan's replica groups share one global batch, those of TorchTitan have one each: set [fault_tolerance] of "
                "Titan (package titan-ft), and training.global_batch_size for all groups together",
            )
    outcome.ignore("fault_tolerance.enable is off", *names)
