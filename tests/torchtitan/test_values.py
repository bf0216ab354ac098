"""What a recipe means stays the same: values and defaults."""

from __future__ import annotations

from typing import Any

import pytest

from harness.old_recipes import imported
from titan_core.api import UserError
from titan_torchtitan.importing import import_recipe
from titan_torchtitan.reading import from_document
from titan_torchtitan.writing import to_toml

LINEAR8, MX = "quantize.linear.float8", "quantize.linear.mx"
FLOAT8: dict[str, Any] = {"model.converters": [LINEAR8]}
SAVES = {"checkpoint.enable": True}
VALIDATES = {"validation.enable": True}
PIPELINE = "parallelism.pipeline_parallel_schedule"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # A batch is that of one data-parallel rank, without accumulation.
        ({"training.local_batch_size": 4}, {"training.local_batch_size": 4, "training.global_batch_size": None}),
        ({"training.local_batch_size": 4, "training.global_batch_size": 32}, {"training.global_batch_size": 32}),
        ({"debug.seed": 3, "debug.deterministic": True}, {"training.seed": 3, "training.deterministic": True}),
        ({"lr_scheduler.total_steps": 90, "training.steps": 30}, {"training.steps": 90, "training.stop_at_step": 30}),
        ({"lr_scheduler.total_steps": 20_000}, {"training.steps": 20_000, "training.stop_at_step": 10_000}),
        ({"profiling.enable_profiling": True}, {"profiling.profile_freq": 10}),
        ({"activation_checkpoint.selective_ac_option": 3}, {"activation_checkpoint.selective_ac_option": "3"}),
        ({"activation_checkpoint.mode": "full"}, {"activation_checkpoint.selective_ac_option": None}),
        # Pipelines
        ({PIPELINE: "gpipe"}, {PIPELINE: "GPipe"}),
        ({PIPELINE: "flexible_interleaved_1f1b"}, {PIPELINE: "Interleaved1F1B"}),
        ({f"{PIPELINE}_csv": "a.csv", PIPELINE: "PipelineScheduleMulti"}, {f"{PIPELINE}_csv": "a.csv", PIPELINE: None}),
        (
            {"parallelism.module_fqns_per_model_part": [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]},
            {"parallelism.pipeline_parallel_split_points": ["layers.1"]},
        ),
        (
            {"parallelism.pipeline_parallel_layers_per_stage": 4},
            {"parallelism.pipeline_parallel_first_stage_less_layers": 1},
        ),
        # Datasets and tokenizers
        ({"training.dataset": "c4"}, {"training.dataset": "c4", "training.dataset_path": None}),
        (
            {"training.dataset": "c4_test", "training.dataset_path": "/data/c4_test"},
            {"training.dataset": "json", "training.dataset_path": "/data/c4_test"},
        ),
        ({"model.hf_assets_path": "./hf"}, {"model.tokenizer": "hf", "model.tokenizer_path": "./hf"}),
        ({"model.hf_assets_path": ""}, {"model.tokenizer_path": "./tests/assets/tokenizer"}),
        # Models
        ({"model.flavor": "8B"}, {"model.flavor": "8B", "model.args.dim": None}),
        ({"model.flavor": "debugmodel_flex_attn"}, {"data.document_mask": True, "model.args.n_layers": 6}),
        ({"model.flavor": "8B_flex_flash"}, {"model.flavor": "8B", "data.document_mask": True}),
        ({"model.name": "simple_fsdp.llama3", "model.flavor": "70B"}, {"model.name": "llama3", "model.flavor": "70B"}),
        # float8
        ({**FLOAT8, f"{LINEAR8}.filter_fqns": "output"}, {"float8.enable": True, "float8.filter_fqns": ["output"]}),
        (
            {**FLOAT8, f"{LINEAR8}.filter_fqns": ["attention.wk", "output"]},
            {"float8.filter_fqns": ["attention.wk", "output"], "float8.convert_head": None},
        ),
        (
            {**FLOAT8, f"{LINEAR8}.filter_fqns": ["attention.wk"]},
            {"float8.filter_fqns": ["attention.wk"], "float8.convert_head": True},
        ),
        ({**FLOAT8}, {"float8.convert_head": True, "float8.filter_fqns": None}),
        (
            {f"{LINEAR8}.recipe_name": "rowwise", f"{LINEAR8}.enable_fsdp_float8_all_gather": True},
            {"float8.recipe_name": "rowwise", "float8.enable_fsdp_float8_all_gather": None},
        ),
        (
            {f"{LINEAR8}.precompute_float8_dynamic_scale_for_fsdp": True},
            {"float8.precompute_float8_dynamic_scale_for_fsdp": None},
        ),
        ({"model.converters": MX, f"{MX}.recipe_name": "mxfp8_cublas_rceil"}, {"mx.recipe_name": "mxfp8_rceil"}),
        ({"model.converters": MX, f"{MX}.recipe_name": "mxfp8_cublas"}, {"mx.recipe_name": "mxfp8_floor"}),
        ({"model.converters": [MX]}, {"mx.enable": True, "mx.recipe_name": "mxfp8_floor", "mx.convert_head": None}),
        ({"model.converters": ["quantize.grouped_mm.float8"]}, {"float8.enable": None}),
        # Checkpoints
        ({**SAVES}, {"checkpoint.last_save_model_only": True, "checkpoint.keep_latest_k": None}),
        ({**SAVES, "checkpoint.exclude_from_loading": "optimizer"}, {"checkpoint.exclude_from_loading": ["optimizer.*"]}),
        ({"checkpoint.initial_load_in_hf": True, "model.hf_assets_path": "hf"}, {"checkpoint.initial_load_path": "hf"}),
        # Validation has no batch of its own.
        (
            {**VALIDATES, "validation.steps": 13, "validation.local_batch_size": 2},
            {"validation.steps": 4, "validation.dataset": "c4_validation", "validation.freq": 10},
        ),
        ({"validation.enable": False, "validation.steps": -1}, {"validation.enable": False, "validation.steps": -1}),
        ({"comm.trace_buf_size": 0}, {"comm.flight_recorder": False, "comm.trace_buf_size": None}),
        ({"job.dump_folder": "./outputs"}, {"job.dump_folder": None}),
        ({"job.dump_folder": "/runs/a"}, {"job.dump_folder": "/runs/a"}),
        ({"metrics.enable_wandb": True}, {"metrics.wandb_project": "torchtitan"}),
        # Defaults
        (
            {"training.seq_len": 2048},
            {
                "training.steps": 10_000,
                "training.dataset_path": "./tests/assets/c4_test",
                "model.flavor": "debug",
                "model.tokenizer_path": "./tests/assets/tokenizer",
                "optimizer.param_groups": [],
                "training.mixed_precision_param": "bfloat16",
                "activation_checkpoint.mode": "selective",
                "activation_checkpoint.selective_ac_option": "2",
            },
        ),
    ],
)
def test_the_meaning_of_a_value(old: dict[str, Any], new: dict[str, Any]) -> None:
    outcome = imported(old)
    assert {key: outcome.values.get(key) for key in new} == new
    assert not outcome.needs_attention


@pytest.mark.parametrize(
    ("old", "key"),
    [
        ({"fault_tolerance.enable": True}, "fault_tolerance.enable"),
        ({"optimizer.early_step_in_backward": True}, "optimizer.early_step_in_backward"),
        ({"training.dtype": "bfloat16"}, "training.dtype"),
        ({"experimental.custom_import": "mine.model"}, "experimental.custom_import"),
        ({"model.converters": [LINEAR8, "mine"]}, "model.converters"),
        ({"profiling.save_traces_folder": "/traces"}, "profiling.save_traces_folder"),
        ({"lr_scheduler.total_steps": 5, "training.steps": 9}, "lr_scheduler.total_steps"),
        ({**VALIDATES, "validation.seq_len": 512}, "validation.seq_len"),
        ({**SAVES, "checkpoint.load_only": True}, "checkpoint.load_only"),
        ({**SAVES, "checkpoint.exclude_from_loading": "dataloader"}, "checkpoint.exclude_from_loading"),
        ({"model.converters": [MX], f"{MX}.recipe_name": "mxfp4_cutlass"}, f"{MX}.recipe_name"),
        ({"parallelism.module_fqns_per_model_part": [["layers.0"]]}, "parallelism.module_fqns_per_model_part"),
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
        ("validation.dataset", "mine", VALIDATES),
        ("optimizer.name", "Muon", {}),
        ("model.flavor", "34B", {}),
        (PIPELINE, "Mine", {}),
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
    document = {"model": {"name": "gpt", "flavor": "L"}, "training": {"dataset": "mine"}, "optimizer": {"name": "Muon"}}
    outcome = import_recipe(from_document(document, "old.toml"), ["llama3", "gpt"], ["mine"], ["Muon"])
    keys = ("model.name", "model.flavor", "training.dataset", "optimizer.name")
    assert [outcome.values[key] for key in keys] == ["gpt", "L", "mine", "Muon"]
    assert not outcome.needs_attention


def test_what_is_switched_off_needs_no_attention() -> None:
    outcome = imported(
        {
            "checkpoint.enable": False,
            "checkpoint.load_only": True,
            "checkpoint.exclude_from_loading": ["dataloader"],
            f"{MX}.recipe_name": "mxfp4_cutlass",
            "fault_tolerance.semi_sync_method": "diloco",
            "validation.seq_len": 512,
            "validation.dataset": "mine",
        }
    )
    assert not outcome.needs_attention


def test_a_default_length_of_validation_that_differs_is_noted() -> None:
    outcome = imported({**VALIDATES, "training.seq_len": 512})
    assert not outcome.needs_attention
    assert any(entry.status == "default" and "TorchTitan's default of 2048" in entry.why for entry in outcome.entries)


def test_an_unknown_key_is_listed() -> None:
    outcome = imported({"training.steps": 9, "training.varlen": True, "mine.table.key": [1, {"a": 2}]})
    unknown = {entry.old: entry.value for entry in outcome.entries if entry.status == "unknown"}
    assert unknown == {"training.varlen": True, "mine.table.key": [1, {"a": 2}]}


@pytest.mark.parametrize("name", ["deepseek_v3", "llama4", "qwen3", "flux", "gpt_oss", "llama3_hf"])
def test_a_model_that_is_not_installed_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"model.name = .* is not among the models .*docs/plugins.md"):
        imported({"model.name": name})
