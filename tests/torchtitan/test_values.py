"""What a recipe means stays the same: values, defaults of each generation, and contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from harness.old_recipes import imported
from titan_core.api.errors import UserError
from titan_torchtitan.importing import import_recipe
from titan_torchtitan.reading import from_document
from titan_torchtitan.writing import to_toml

LLAMA = {"model.name": "llama3"}
OLD = {"training.warmup_steps": 2}
"""A key of 2024 only."""
MIDDLE = {"lr_scheduler.warmup_steps": 2}
"""A key of 2025 only."""
LATE = {"training.local_batch_size": 8}
LAST = {"debug.seed": 1}
SAVES = {"checkpoint.enable": True}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # A batch is that of one data-parallel rank, without accumulation.
        ({"training.batch_size": 4}, {"training.local_batch_size": 4, "training.global_batch_size": None}),
        ({"training.local_batch_size": 4, "training.global_batch_size": 32}, {"training.global_batch_size": 32}),
        ({**OLD}, {"lr_scheduler.warmup_steps": 2}),
        ({"optimizer.fused": False, **OLD}, {"optimizer.implementation": "foreach"}),
        ({"training.compile": True}, {"compile.enable": True}),
        ({"training.seed": 3}, {"training.seed": 3}),
        ({"debug.seed": 3, "debug.deterministic": True}, {"training.seed": 3, "training.deterministic": True}),
        ({"training.data_parallel_degree": 4}, {"parallelism.data_parallel_shard_degree": 4}),
        (
            {"training.data_parallel_degree": 4, "training.data_parallel_type": "ddp"},
            {"parallelism.data_parallel_replicate_degree": 4, "parallelism.data_parallel_shard_degree": 1},
        ),
        ({"training.enable_loss_parallel": False}, {"parallelism.disable_loss_parallel": True}),
        ({"lr_scheduler.lr_min": 0.1}, {"lr_scheduler.min_lr_factor": 0.1}),
        ({"lr_scheduler.total_steps": 90, "training.steps": 30}, {"training.steps": 90, "training.stop_at_step": 30}),
        ({"profiling.run_profiler": True}, {"profiling.enable_profiling": True, "profiling.profile_freq": 10}),
        ({"activation_checkpoint.selective_ac_option": 3}, {"activation_checkpoint.selective_ac_option": "3"}),
        # Schedules
        ({"experimental.pipeline_parallel_schedule": "gpipe"}, {"parallelism.pipeline_parallel_schedule": "GPipe"}),
        ({"experimental.pipeline_parallel_schedule": "1f1b"}, {"parallelism.pipeline_parallel_schedule": "1F1B"}),
        (
            {"experimental.pipeline_parallel_schedule": "flexible_interleaved_1f1b"},
            {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"},
        ),
        (
            {"parallelism.pipeline_parallel_schedule": "zbvzerobubble"},
            {"parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"},
        ),
        (
            {
                "parallelism.pipeline_parallel_schedule_csv": "a.csv",
                "parallelism.pipeline_parallel_schedule": "PipelineScheduleMulti",
            },
            {"parallelism.pipeline_parallel_schedule_csv": "a.csv", "parallelism.pipeline_parallel_schedule": None},
        ),
        (
            {"experimental.pipeline_parallel_split_points": "layers.2,layers.4"},
            {"parallelism.pipeline_parallel_split_points": ["layers.2", "layers.4"]},
        ),
        (
            {"parallelism.module_fqns_per_model_part": [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]},
            {"parallelism.pipeline_parallel_split_points": ["layers.1"]},
        ),
        # Microbatches: their number until 2025, then their size.
        (
            {
                "experimental.pipeline_parallel_degree": 2,
                "experimental.pipeline_parallel_microbatches": 4,
                "training.batch_size": 8,
            },
            {"parallelism.pipeline_parallel_microbatch_size": 2},
        ),
        (
            {"experimental.pipeline_parallel_degree": 2, "training.batch_size": 8},
            {"parallelism.pipeline_parallel_microbatch_size": 4},
        ),
        (
            {"parallelism.pipeline_parallel_degree": 2, **LATE},
            {"parallelism.pipeline_parallel_microbatch_size": None},
        ),
        # Datasets and tokenizers
        ({"training.dataset": "c4"}, {"training.dataset": "c4", "training.dataset_path": None}),
        (
            {"training.dataset": "c4_mini"},
            {"training.dataset": "json", "training.dataset_path": "./torchtitan/datasets/c4_mini"},
        ),
        (
            {"training.dataset": "c4_test", "training.dataset_path": "/data/c4_test"},
            {"training.dataset": "json", "training.dataset_path": "/data/c4_test"},
        ),
        (
            {"model.tokenizer_path": "a/tokenizer.model"},
            {"model.tokenizer": "llama3", "model.tokenizer_path": "a/tokenizer.model"},
        ),
        ({"model.tokenizer_path": "./assets/tokenizer/Llama-3.1-8B"}, {"model.tokenizer": "hf"}),
        ({"model.hf_assets_path": "./assets/hf/Llama-3.1-8B"}, {"model.tokenizer_path": "./assets/hf/Llama-3.1-8B"}),
        (
            {"model.name": "llama2", "model.tokenizer_path": "/a/tokenizer.model"},
            {"model.tokenizer": "hf", "model.tokenizer_path": "/a/tokenizer.json"},
        ),
        # Models
        ({**LLAMA, "model.flavor": "8B", **OLD}, {"model.flavor": "8B", "model.args.rope_scaling.factor": 1.0}),
        ({**LLAMA, "model.flavor": "8B", **LAST}, {"model.flavor": "8B", "model.args.rope_scaling.factor": None}),
        ({**LLAMA, "model.flavor": "debugmodel", **OLD}, {"model.flavor": "debug", "model.args.n_layers": 8}),
        ({**LLAMA, "model.flavor": "debugmodel", **MIDDLE}, {"model.args.n_layers": 6, "model.args.ffn_dim": 768}),
        ({**LLAMA, "model.flavor": "debugmodel_flex_attn", **MIDDLE}, {"data.document_mask": True, "model.args.dim": 256}),
        (
            {**LLAMA, "model.flavor": "8B_flex_flash", **LAST},
            {"model.flavor": "8B", "data.document_mask": True, "model.args.rope_scaling.factor": None},
        ),
        (
            {"model.name": "llama3.2", "model.flavor": "1b", **MIDDLE},
            {"model.name": "llama3", "model.flavor": "1B", "model.args.rope_scaling.factor": 1.0},
        ),
        ({"model.name": "simple_fsdp.llama3", "model.flavor": "70B"}, {"model.name": "llama3", "model.flavor": "70B"}),
        ({"model.name": "llama2", "model.flavor": "70B"}, {"model.args.ffn_dim": 28_672, "model.args.n_kv_heads": 8}),
        ({"model.name": "llama2", "model.flavor": "7B"}, {"model.args.ffn_dim": 11_008, "model.args.vocab_size": 32_000}),
        # float8
        ({"training.fp8_linear": "dynamic"}, {"float8.enable": True, "float8.convert_head": None}),
        ({"float8.enable_float8_linear": True}, {"float8.enable": True, "float8.convert_head": None}),
        (
            {"model.converters": "float8", "float8.filter_fqns": "output"},
            {"float8.enable": True, "float8.filter_fqns": ["output"]},
        ),
        (
            {
                "model.converters": ["quantize.linear.float8"],
                "quantize.linear.float8.filter_fqns": ["attention.wk", "output"],
            },
            {"float8.enable": True, "float8.filter_fqns": ["attention.wk", "output"], "float8.convert_head": None},
        ),
        (
            {"model.converters": ["float8"], "float8.filter_fqns": ["attention.wk"]},
            {"float8.filter_fqns": ["attention.wk"], "float8.convert_head": True},
        ),
        ({"model.converters": ["float8"], **LATE}, {"float8.convert_head": True}),
        (
            {"model.converters": ["mx"], "mx.recipe_name": "mxfp8_cublas_rceil"},
            {"mx.enable": True, "mx.recipe_name": "mxfp8_rceil"},
        ),
        (
            {
                "float8.recipe_name": "rowwise",
                "float8.enable_fsdp_float8_all_gather": True,
                "float8.precompute_float8_dynamic_scale_for_fsdp": True,
            },
            {"float8.enable_fsdp_float8_all_gather": None, "float8.precompute_float8_dynamic_scale_for_fsdp": None},
        ),
        ({"model.converters": ["quantize.dense.mx"], **LATE}, {"mx.enable": True, "mx.recipe_name": "mxfp8_floor"}),
        ({"model.converters": ["quantize.grouped_mm.float8"]}, {"float8.enable": None}),
        # Checkpoints
        (
            {"training.checkpoint_folder": "ckpt"},
            {"checkpoint.enable": True, "checkpoint.folder": "ckpt", "checkpoint.interval": 3600},
        ),
        ({"checkpoint.enable_checkpoint": True, **OLD}, {"checkpoint.enable": True, "checkpoint.keep_latest_k": 0}),
        (
            {"checkpoint.enable_checkpoint": True, **LATE},
            {"checkpoint.last_save_model_only": True, "checkpoint.keep_latest_k": None},
        ),
        ({"checkpoint.exclude_from_loading": "optimizer"}, {"checkpoint.exclude_from_loading": ["optimizer.*"]}),
        (
            {"checkpoint.initial_load_in_hf": True, "model.hf_assets_path": "hf"},
            {"checkpoint.initial_load_path": "hf"},
        ),
        # Validation has no batch of its own.
        (
            {
                "validation.enable": True,
                "validation.steps": 12,
                "validation.local_batch_size": 2,
                "training.local_batch_size": 8,
            },
            {"validation.steps": 3, "validation.dataset": "c4_validation", "validation.freq": 10},
        ),
        ({"validation.enabled": False, "validation.steps": -1}, {"validation.enable": False, "validation.steps": -1}),
        ({"comm.trace_buf_size": 0}, {"comm.flight_recorder": False}),
        ({"job.dump_folder": "./outputs"}, {"job.dump_folder": None}),
        ({"job.dump_folder": "/runs/a"}, {"job.dump_folder": "/runs/a"}),
        # Defaults
        (
            {**OLD},
            {
                "training.steps": 10_000,
                "training.dataset_path": "./torchtitan/datasets/c4_mini",
                "optimizer.param_groups": [],
                "training.mixed_precision_param": "bfloat16",
                "activation_checkpoint.mode": "selective",
                "activation_checkpoint.selective_ac_option": "2",
            },
        ),
        ({**LATE}, {"training.dataset_path": "./tests/assets/c4_test", "model.tokenizer_path": "./tests/assets/tokenizer"}),
    ],
)
def test_the_meaning_of_a_value(old: dict[str, Any], new: dict[str, Any]) -> None:
    outcome = imported(old)
    assert {key: outcome.values.get(key) for key in new} == new
    assert not outcome.needs_attention


@pytest.mark.parametrize(
    ("old", "key"),
    [
        ({"model.norm_type": "layernorm"}, "model.norm_type"),
        ({**SAVES, "checkpoint.interval_type": "seconds", "checkpoint.interval": 600}, "checkpoint.interval"),
        ({"float8.enable_float8_linear": True, "float8.scaling_type_input": "delayed"}, "float8.scaling_type_input"),
        ({"fault_tolerance.enable": True}, "fault_tolerance.enable"),
        ({"optimizer.early_step_in_backward": True}, "optimizer.early_step_in_backward"),
        ({"training.dtype": "bfloat16"}, "training.dtype"),
        ({"experimental.custom_import": "mine.model"}, "experimental.custom_import"),
        ({"model.converters": ["float8", "mine"]}, "model.converters"),
        ({"profiling.save_traces_folder": "/traces"}, "profiling.save_traces_folder"),
        ({"lr_scheduler.total_steps": 5, "training.steps": 9}, "lr_scheduler.total_steps"),
        ({"validation.enable": True, "validation.seq_len": 512}, "validation.seq_len"),
        ({**SAVES, "checkpoint.load_only": True}, "checkpoint.load_only"),
        ({**SAVES, "checkpoint.exclude_from_loading": "dataloader"}, "checkpoint.exclude_from_loading"),
        ({"model.converters": ["mx"], "mx.recipe_name": "mxfp4_cutlass"}, "mx.recipe_name"),
    ],
)
def test_what_titan_cannot_do_is_listed(old: dict[str, Any], key: str) -> None:
    outcome = imported({"training.steps": 9, **old})
    (entry,) = (entry for entry in outcome.entries if entry.old == key)
    assert entry.status == "unsupported" and entry.why
    assert outcome.needs_attention


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [
        ("training.dataset", "mine", {}),
        ("validation.dataset", "mine", {"validation.enable": True}),
        ("optimizer.name", "Muon", {}),
        ("model.flavor", "34B", {**LLAMA}),
        ("model.flavor", "34B", {"model.name": "llama2"}),
        ("parallelism.pipeline_parallel_schedule", "Mine", {}),
    ],
)
def test_a_name_that_titan_lacks_stays_in_the_recipe_and_needs_attention(
    key: str, value: str, others: dict[str, Any]
) -> None:
    outcome = imported({key: value, **others})
    (entry,) = (entry for entry in outcome.entries if entry.old == key)
    assert entry.status == "unsupported" and outcome.needs_attention
    assert outcome.values[key] == value
    (line,) = (line for line in to_toml(outcome).splitlines() if f'"{value}"' in line)
    assert not line.startswith("#") and line.endswith(f"# {entry.why}")


def test_names_of_installed_plugins_are_kept() -> None:
    old = from_document({"training": {"dataset": "mine"}, "optimizer": {"name": "Muon"}}, "old.toml")
    outcome = import_recipe(old, ["llama3"], ["mine"], ["Muon"])
    assert (outcome.values["training.dataset"], outcome.values["optimizer.name"]) == ("mine", "Muon")
    assert not outcome.needs_attention


def test_what_is_switched_off_needs_no_attention() -> None:
    outcome = imported(
        {
            "checkpoint.enable": False,
            "checkpoint.interval_type": "seconds",
            "checkpoint.load_only": True,
            "checkpoint.exclude_from_loading": ["dataloader"],
            "float8.scaling_type_input": "delayed",
            "mx.recipe_name": "mxfp4_cutlass",
            "fault_tolerance.semi_sync_method": "diloco",
            "validation.seq_len": 512,
            "validation.dataset": "mine",
        }
    )
    assert not outcome.needs_attention


def test_an_unknown_key_is_listed() -> None:
    outcome = imported({"training.steps": 9, "training.varlen": True, "mine.table.key": [1, {"a": 2}]})
    unknown = {entry.old: entry.value for entry in outcome.entries if entry.status == "unknown"}
    assert unknown == {"training.varlen": True, "mine.table.key": [1, {"a": 2}]}


def test_two_names_of_one_key_must_agree() -> None:
    same = imported({"training.batch_size": 8, "training.local_batch_size": 8})
    assert [entry.old for entry in same.entries if "training.local_batch_size" in entry.new] == [
        "training.batch_size", "training.local_batch_size",
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"training.batch_size = 8 and training.local_batch_size = 4: are two names"):
        imported({"training.batch_size": 8, "training.local_batch_size": 4})


@pytest.mark.parametrize("name", ["deepseek_v3", "llama4", "qwen3", "flux", "gpt_oss", "llama3_hf"])
def test_a_model_that_is_not_installed_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"model.name = .* is not among the models .*docs/plugins.md"):
        imported({"model.name": name})
