"""Titan's own packages, by what a config asks of them. Used for one thing: telling a user which package to install."""

from __future__ import annotations

from typing import Final

PACKAGE_OF: Final = {
    # a section, or one key of the core's sections
    "activation_checkpoint": "titan-parallel",
    "compile": "titan-parallel",
    "parallelism": "titan-parallel",
    "training.mixed_precision_param": "titan-parallel",
    "training.mixed_precision_reduce": "titan-parallel",
    "training.enable_cpu_offload": "titan-parallel",
    # keys that a package adds to a section of the core's
    "parallelism.fsdp_reshard_after_forward": "titan-parallel",
    "parallelism.disable_sequence_parallel": "titan-parallel",
    "parallelism.disable_loss_parallel": "titan-parallel",
    "parallelism.enable_async_tensor_parallel": "titan-parallel",
    "parallelism.context_parallel_rotate_method": "titan-parallel",
    "parallelism.pipeline_parallel_schedule": "titan-parallel",
    "parallelism.pipeline_parallel_schedule_csv": "titan-parallel",
    "parallelism.pipeline_parallel_microbatch_size": "titan-parallel",
    "parallelism.pipeline_parallel_split_points": "titan-parallel",
    "parallelism.pipeline_parallel_layers_per_stage": "titan-parallel",
    "parallelism.pipeline_parallel_first_stage_less_layers": "titan-parallel",
    "parallelism.pipeline_parallel_last_stage_less_layers": "titan-parallel",
    "comm.flight_recorder": "titan-debug",
    "comm.trace_buf_size": "titan-debug",
    "comm.save_traces_folder": "titan-debug",
    "comm.watchdog_seconds": "titan-debug",
    "checkpoint": "titan-ckpt",
    "quantize": "titan-float8",
    "float8": "titan-float8",
    "mx": "titan-float8",
    "profiling": "titan-debug",
    "metrics.enable_tensorboard": "titan-report",
    "metrics.save_tb_folder": "titan-report",
    "metrics.enable_wandb": "titan-report",
    "metrics.wandb_project": "titan-report",
    "metrics.wandb_entity": "titan-report",
    "metrics.wandb_name": "titan-report",
    "metrics.wandb_mode": "titan-report",
    "report": "titan-report",
    "watch": "titan-report",
    "compare": "titan-report",
    "numerics": "titan-debug",
    "experimental": "titan-parallel",
    # a dataset or a tokenizer
    "json": "titan-data",
    "parquet": "titan-data",
    "arrow": "titan-data",
    "text": "titan-data",
    "tokenized": "titan-data",
    "hub": "titan-data",
    "c4": "titan-data",
    "c4_validation": "titan-data",
    "hf": "titan-data",
    # a command
    "data tokenize": "titan-data",
    # a model family
    "llama3": "titan-models-llama",
}


def package_for(key: str, exactly: bool = False) -> str | None:
    """The package of Titan's that provides a section (``"float8"``) or a key (``"parallelism.tensor_parallel_degree"``);
    ``exactly``: not the one that provides its section."""
    return PACKAGE_OF.get(key) or (None if exactly else PACKAGE_OF.get(key.partition(".")[0]))
