"""The keys of TorchTitan's recipes, from March 2024 until TOML was replaced at the beginning of 2026.

TorchTitan renamed many keys. :data:`KEYS` lists each key under its last name, and :data:`ALIASES` the earlier names. Source:
``config_manager.py`` and ``config/job_config.py`` of TorchTitan at many commits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal


class Generation(IntEnum):
    """A period with its own names and defaults. A recipe belongs to the latest one whose names it uses."""

    TORCHTRAIN = 0
    """March and April 2024, when the project was called TorchTrain."""
    EARLY = 1
    """May 2024 to January 2025: parallelism in [training] and [experimental]."""
    MIDDLE = 2
    """February to June 2025: [parallelism], [lr_scheduler] and model.converters."""
    LATE = 3
    """July to September 2025: training.local_batch_size, [validation], [compile]."""
    LAST = 4
    """October 2025 to January 2026: [quantize.linear], checkpoint.enable, [debug]; RoPE scaling (since #1839)."""

    def __str__(self) -> str:
        return ("spring 2024", "2024", "the first half of 2025", "summer 2025", "the end of 2025")[self]


TORCHTRAIN, EARLY, MIDDLE, LATE, LAST = Generation

Kind = Literal["bool", "int", "float", "str", "list", "ranks", "any"]
"""Type of a value. "list" holds strings, "ranks" holds whole numbers."""


@dataclass(frozen=True)
class Key:
    """A key of TorchTitan."""

    kind: Kind
    since: Generation = TORCHTRAIN
    """The first generation that has it under this name."""


@dataclass(frozen=True)
class Alias:
    """An earlier name of a key."""

    key: str
    until: Generation
    """The last generation that has it."""
    since: Generation = TORCHTRAIN
    kind: Kind | None = None
    """Type of the earlier key. Default: that of ``key``."""
    convert: Callable[[Any], Any] | None = None
    """Converts a value of the earlier key to one of ``key``. Default: the value stays the same."""


def _section(name: str, keys: dict[str, Kind | tuple[Kind, Generation]]) -> dict[str, Key]:
    entries = {key: entry if isinstance(entry, tuple) else (entry, TORCHTRAIN) for key, entry in keys.items()}
    return {f"{name}.{key}": Key(kind, since) for key, (kind, since) in entries.items()}


KEYS: Final[dict[str, Key]] = {
    **_section("job", {
        "config_file": "str", "dump_folder": "str", "description": "str", "use_for_integration_test": "bool",
        "print_config": ("bool", LAST), "save_config_file": ("str", LAST), "custom_config_module": ("str", LATE),
    }),
    **_section("profiling", {
        "enable_profiling": ("bool", EARLY), "save_traces_folder": "str", "profile_freq": ("int", EARLY),
        "profiler_active": ("int", LATE), "profiler_warmup": ("int", LATE), "enable_memory_snapshot": ("bool", EARLY),
        "save_memory_snapshot_folder": ("str", EARLY), "profile_ranks": ("ranks", LATE),
        "profile_with_stack": ("bool", LATE),
    }),
    **_section("metrics", {
        "log_freq": "int", "enable_tensorboard": "bool", "save_tb_folder": "str", "disable_color_printing": ("bool", EARLY),
        "save_for_all_ranks": ("bool", MIDDLE), "enable_wandb": ("bool", EARLY),
    }),
    **_section("model", {
        "name": "str", "flavor": "str", "tokenizer_path": "str", "norm_type": "str", "hf_assets_path": ("str", LATE),
        "converters": ("list", MIDDLE), "print_after_conversion": ("bool", MIDDLE), "use_flex_attn": ("bool", MIDDLE),
        "attn_mask_type": ("str", MIDDLE),
    }),
    **_section("optimizer", {
        "name": "str", "lr": "float", "beta1": ("float", MIDDLE), "beta2": ("float", MIDDLE), "eps": ("float", MIDDLE),
        "weight_decay": ("float", MIDDLE), "implementation": ("str", MIDDLE), "early_step_in_backward": ("bool", EARLY),
    }),
    **_section("lr_scheduler", {
        "warmup_steps": ("int", MIDDLE), "total_steps": ("int", LAST), "decay_ratio": ("float", MIDDLE),
        "decay_type": ("str", MIDDLE), "min_lr_factor": ("float", LATE),
    }),
    **_section("training", {
        "dataset": "str", "dataset_path": "str", "local_batch_size": ("int", LATE), "global_batch_size": ("int", LATE),
        "seq_len": "int", "max_norm": "float", "steps": "int", "enable_cpu_offload": ("bool", EARLY),
        "dtype": ("str", LATE), "mixed_precision_param": ("str", EARLY), "mixed_precision_reduce": ("str", EARLY),
        "gc_freq": "int", "gc_debug": ("bool", LATE), "data_parallel_type": "str",
        "dataloader.num_workers": ("int", LAST), "dataloader.persistent_workers": ("bool", LAST),
        "dataloader.pin_memory": ("bool", LAST), "dataloader.prefetch_factor": ("int", LAST),
    }),
    **_section("parallelism", {
        "data_parallel_replicate_degree": ("int", MIDDLE), "data_parallel_shard_degree": ("int", MIDDLE),
        "fsdp_reshard_after_forward": ("str", MIDDLE), "tensor_parallel_degree": ("int", MIDDLE),
        "disable_loss_parallel": ("bool", MIDDLE), "enable_async_tensor_parallel": ("bool", MIDDLE),
        "enable_compiled_autograd": ("bool", MIDDLE), "pipeline_parallel_degree": ("int", MIDDLE),
        "pipeline_parallel_split_points": ("list", MIDDLE), "module_fqns_per_model_part": ("any", LATE),
        "pipeline_parallel_first_stage_less_layers": ("int", LATE),
        "pipeline_parallel_last_stage_less_layers": ("int", LATE),
        "pipeline_parallel_layers_per_stage": ("int", MIDDLE), "pipeline_parallel_schedule": ("str", MIDDLE),
        "pipeline_parallel_schedule_csv": ("str", MIDDLE), "pipeline_parallel_microbatch_size": ("int", MIDDLE),
        "pipeline_parallel_microbatches": ("int", MIDDLE), "pipeline_parallel_expert_parallel_overlap": ("bool", LAST),
        "context_parallel_degree": ("int", MIDDLE), "context_parallel_rotate_method": ("str", MIDDLE),
        "context_parallel_load_balancer": ("str", LAST), "expert_parallel_degree": ("int", LATE),
        "expert_tensor_parallel_degree": ("int", LATE), "expert_parallel_comm_backend": ("str", LAST),
        "expert_parallel_a2a_impl": ("str", LATE),
    }),
    **_section("checkpoint", {
        "enable": ("bool", LAST), "folder": "str", "interval": "int", "interval_type": "str",
        "initial_load_path": ("str", MIDDLE), "initial_load_model_only": ("bool", LATE),
        "initial_load_in_hf": ("bool", LATE), "initial_load_in_hf_quantized": ("bool", LATE),
        "last_save_model_only": ("bool", LATE), "last_save_in_hf": ("bool", LATE), "export_dtype": "str",
        "async_mode": ("str", EARLY), "keep_latest_k": ("int", EARLY), "load_step": ("int", EARLY),
        "exclude_from_loading": ("list", EARLY), "enable_first_step_checkpoint": ("bool", LATE),
        "create_seed_checkpoint": ("bool", EARLY), "load_only": ("bool", LATE),
        "enable_ft_dataloader_checkpoints": ("bool", LATE),
    }),
    **_section("activation_checkpoint", {
        "mode": "str", "selective_ac_option": "str", "per_op_sac_force_recompute_mm_shapes_by_fqns": ("list", LATE),
        "early_stop": ("bool", LATE), "memory_budget": ("float", LATE), "visualize_memory_budget_pareto": ("bool", LATE),
        "preserve_rng_state": ("bool", LAST), "determinism_check": ("str", LAST), "debug": ("bool", LAST),
    }),
    **_section("compile", {
        "enable": ("bool", LATE), "components": ("list", LATE), "backend": ("str", LAST),
        "model_backend_override": ("str", LAST),
    }),
    **_section("float8", {
        "enable_fsdp_float8_all_gather": ("bool", EARLY), "precompute_float8_dynamic_scale_for_fsdp": ("bool", EARLY),
        "force_recompute_fp8_weight_in_bwd": ("bool", MIDDLE), "recipe_name": ("str", MIDDLE),
        "filter_fqns": ("list", MIDDLE), "emulate": ("bool", MIDDLE), "scaling_type_input": ("str", EARLY),
        "scaling_type_weight": ("str", EARLY), "scaling_type_grad_output": ("str", EARLY),
        "moe_fqns_prototype": ("list", LATE), "float8_rowwise_for_moe": ("bool", MIDDLE),
    }),
    **_section("mx", {
        "recipe_name": ("str", MIDDLE), "filter_fqns": ("list", MIDDLE), "mxfp8_dim1_cast_kernel_choice": ("str", LATE),
        "use_fp8_dim1_cast_triton_kernel": ("bool", MIDDLE), "moe_fqns_prototype": ("list", LATE),
        "moe_recipe_name": ("str", LATE),
    }),
    **_section("comm", {
        "init_timeout_seconds": "int", "train_timeout_seconds": "int", "trace_buf_size": "int",
        "save_traces_folder": ("str", LATE), "save_traces_file_prefix": ("str", LATE), "mode": ("str", LAST),
    }),
    **_section("memory_estimation", {"enable": ("bool", LAST), "disable_fake_mode": ("bool", EARLY)}),
    **_section("fault_tolerance", {
        "enable": ("bool", MIDDLE), "process_group": ("str", LATE), "process_group_timeout_ms": ("int", LATE),
        "replica_id": ("int", MIDDLE), "group_size": ("int", MIDDLE), "min_replica_size": ("int", MIDDLE),
        "semi_sync_method": ("str", MIDDLE), "sync_steps": ("int", MIDDLE), "should_quantize": ("bool", LATE),
        "fragment_sync_delay": ("int", LATE), "fragment_update_alpha": ("float", LATE), "num_fragments": ("int", LATE),
        "module_fqns_per_model_fragment": ("any", LATE),
    }),
    **_section("experimental", {"custom_import": ("str", MIDDLE), "pipeline_parallel_split_mode": ("str", EARLY)}),
    **_section("liger_kernel", {"enable_fused_linear_cross_entropy": ("bool", LATE)}),
    **_section("validation", {
        "enable": ("bool", LAST), "dataset": ("str", LATE), "dataset_path": ("str", LATE), "local_batch_size": ("int", LATE),
        "seq_len": ("int", LATE), "freq": ("int", LATE), "steps": ("int", LATE),
        "dataloader.num_workers": ("int", LAST), "dataloader.persistent_workers": ("bool", LAST),
        "dataloader.pin_memory": ("bool", LAST), "dataloader.prefetch_factor": ("int", LAST),
    }),
    **_section("debug", {
        "seed": ("int", LAST), "deterministic": ("bool", LAST), "deterministic_warn_only": ("bool", LAST),
        "moe_force_load_balance": ("bool", LAST), "print_config": ("bool", LAST), "save_config_file": ("str", LAST),
    }),
}  # fmt: skip
"""All keys, by their last name."""


def _not(value: bool) -> bool:
    return not value


def _float8(enabled: bool | str) -> list[str]:
    return ["float8"] if enabled else []


_PARALLELISM_IN_TRAINING = (
    "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward", "tensor_parallel_degree",
    "disable_loss_parallel",
)  # fmt: skip
_PARALLELISM_IN_EXPERIMENTAL = (
    "enable_async_tensor_parallel", "enable_compiled_autograd", "pipeline_parallel_degree", "pipeline_parallel_split_points",
    "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv",
    "pipeline_parallel_microbatches", "context_parallel_degree", "context_parallel_rotate_method",
)  # fmt: skip
_MODEL_PART_NAMES = (
    "module_names_per_model_chunk", "module_fqns_per_model_chunk", "pipeline_parallel_module_fqns_per_model_part",
)  # fmt: skip

ALIASES: Final[dict[str, Alias]] = {
    "job.print_args": Alias("job.print_config", LATE),
    "job.save_config_folder": Alias("job.save_config_file", LAST, LAST),
    "experimental.custom_args_module": Alias("job.custom_config_module", LAST, MIDDLE),
    "experimental.custom_model_path": Alias("experimental.custom_import", MIDDLE, EARLY),
    "profiling.run_profiler": Alias("profiling.enable_profiling", TORCHTRAIN),
    "profiling.profile_every_x_iter": Alias("profiling.profile_freq", TORCHTRAIN),
    "metrics.enable_color_printing": Alias("metrics.disable_color_printing", EARLY, convert=_not),
    "metrics.rank_0_only": Alias("metrics.save_for_all_ranks", MIDDLE, convert=_not),
    "optimizer.fused": Alias(
        "optimizer.implementation", MIDDLE, EARLY, "bool", lambda fused: "fused" if fused else "foreach"
    ),
    "training.warmup_steps": Alias("lr_scheduler.warmup_steps", EARLY),
    "lr_scheduler.lr_min": Alias("lr_scheduler.min_lr_factor", LATE, MIDDLE),
    "training.batch_size": Alias("training.local_batch_size", MIDDLE),
    "training.compile": Alias("compile.enable", LATE),
    "training.compile_autograd": Alias("parallelism.enable_compiled_autograd", TORCHTRAIN),
    "training.seed": Alias("debug.seed", LATE, EARLY),
    "training.deterministic": Alias("debug.deterministic", LATE, EARLY),
    "training.deterministic_warn_only": Alias("debug.deterministic_warn_only", LATE, LATE),
    "training.debug_moe_force_load_balance": Alias("debug.moe_force_load_balance", LATE, LATE),
    "training.data_parallel_degree": Alias("parallelism.data_parallel_shard_degree", EARLY),
    "training.sequence_parallel_degree": Alias("parallelism.tensor_parallel_degree", TORCHTRAIN),
    "training.pipeline_parallel_degree": Alias("parallelism.pipeline_parallel_degree", TORCHTRAIN),
    "training.enable_loss_parallel": Alias("parallelism.disable_loss_parallel", EARLY, convert=_not),
    **{f"training.{name}": Alias(f"parallelism.{name}", EARLY) for name in _PARALLELISM_IN_TRAINING},
    **{f"experimental.{name}": Alias(f"parallelism.{name}", EARLY, EARLY) for name in _PARALLELISM_IN_EXPERIMENTAL},
    **{
        f"parallelism.{name}": Alias("parallelism.module_fqns_per_model_part", LAST, LATE)
        for name in _MODEL_PART_NAMES
    },
    "training.checkpoint_folder": Alias("checkpoint.folder", TORCHTRAIN),
    "checkpoint.checkpoint_folder": Alias("checkpoint.folder", TORCHTRAIN),
    "training.checkpoint_interval": Alias("checkpoint.interval", TORCHTRAIN),
    "training.checkpoint_interval_type": Alias("checkpoint.interval_type", TORCHTRAIN),
    "checkpoint.enable_checkpoint": Alias("checkpoint.enable", LATE, EARLY),
    "checkpoint.model_weights_only": Alias("checkpoint.last_save_model_only", MIDDLE),
    "checkpoint.last_save_model_weights_only": Alias("checkpoint.last_save_model_only", MIDDLE, MIDDLE),
    "checkpoint.initial_load_model_weights_only": Alias("checkpoint.initial_load_model_only", MIDDLE, MIDDLE),
    "training.fp8_linear": Alias("model.converters", EARLY, kind="str", convert=_float8),
    "training.enable_fp8_linear": Alias("model.converters", EARLY, kind="bool", convert=_float8),
    "training.enable_float8_linear": Alias("model.converters", EARLY, EARLY, "bool", _float8),
    "training.enable_fsdp_float8_all_gather": Alias("float8.enable_fsdp_float8_all_gather", EARLY, EARLY),
    "training.enable_fsdp_fp8_all_gather": Alias("float8.enable_fsdp_float8_all_gather", EARLY, EARLY),
    "training.precompute_float8_dynamic_scale_for_fsdp": Alias(
        "float8.precompute_float8_dynamic_scale_for_fsdp", EARLY, EARLY
    ),
    "float8.enable_float8_linear": Alias("model.converters", EARLY, EARLY, "bool", _float8),
    **{
        f"quantize.{linear}.{name}": Alias(f"float8.{name}", until, until)
        # "fp8" is a misprint in a recipe that TorchTitan published.
        for linear, until in (("dense.float8", LATE), ("linear.float8", LAST), ("linear.fp8", LAST))
        for name in (
            "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp", "recipe_name", "filter_fqns",
            "emulate",
        )
    },
    **{
        f"quantize.{linear}.mx.{name}": Alias(f"mx.{name}", until, until)
        for linear, until in (("dense", LATE), ("linear", LAST))
        for name in ("mxfp8_dim1_cast_kernel_choice", "recipe_name", "filter_fqns")
    },
    **{
        f"quantize.{experts}.{name}": Alias(key, until, until)
        for experts, until in (("moe", LATE), ("grouped_mm", LAST))
        for name, key in (
            ("float8.fqns", "float8.moe_fqns_prototype"), ("mx.fqns", "mx.moe_fqns_prototype"),
            ("mx.recipe_name", "mx.moe_recipe_name"),
        )
    },
    "memory_estimation.enabled": Alias("memory_estimation.enable", LATE, EARLY),
    "validation.enabled": Alias("validation.enable", LATE, LATE),
}  # fmt: skip
"""Earlier names of :data:`KEYS`."""

SHARED: Final = frozenset({"training.seed", "training.deterministic"})
"""Earlier names that are also Titan's."""

TITAN_ONLY: Final = frozenset({
    "model.tokenizer", "training.dataset_split", "training.stop_at_step", "training.float32_matmul_precision",
    "training.on_nan", "optimizer.param_groups", "lr_scheduler.name", "objective.name", "objective.chunk_tokens",
    "data.document_mask", "data.mixture", "data.text_field", "data.on_end", "data.logical_shards", "plugins.disable",
    "job.device", "numerics.locate_nan", "numerics.spike_action", "float8.enable", "float8.convert_head", "mx.enable",
    "mx.convert_head", "compile.fullgraph", "comm.flight_recorder", "comm.watchdog_seconds", "checkpoint.allow_changed",
    "checkpoint.keep_every_n_steps", "parallelism.disable_sequence_parallel", "profiling.record_shapes",
    "profiling.with_stack", "profiling.ranks", "metrics.wandb_mode", "fault_tolerance.lighthouse",
})  # fmt: skip
"""Keys of Titan that TorchTitan never had."""
