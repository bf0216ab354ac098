"""Recipes of TorchTitan, of every shape that it published in 2024 and 2025, import and pass ``titan config check``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli

from harness.old_recipes import RECIPES, changed, imported
from titan_completion.schema import json_schema
from titan_core.cli.main import main
from titan_core.plugins.registry import Registry
from titan_models_llama.config import FLAVORS
from titan_torchtitan.importing import import_recipe
from titan_torchtitan.keys import ALIASES, KEYS, SHARED, TITAN_ONLY
from titan_torchtitan.reading import read

SPRING, OLD, MIDDLE, LATE, LAST = "spring_2024", "2024", "first_half_of_2025", "summer_2025", "end_of_2025"
FLOAT8 = {
    "float8.enable_float8_linear": True, "float8.enable_fsdp_float8_all_gather": True,
    "float8.precompute_float8_dynamic_scale_for_fsdp": True,
}  # fmt: skip
GATHERED = {
    "float8.recipe_name": None, "float8.enable_fsdp_float8_all_gather": True,
    "float8.precompute_float8_dynamic_scale_for_fsdp": True,
}  # fmt: skip

SHAPES: dict[str, tuple[str, dict[str, Any], int]] = {
    # March to April 2024
    "spring-debug": (SPRING, {}, 2),
    "spring-7b": (SPRING, {"model.flavor": "7B", "model.norm_type": "fused_rmsnorm", "training.batch_size": 1}, 8),
    "spring-13b": (SPRING, {"model.flavor": "13B", "training.sequence_parallel_degree": 8, "training.compile": True}, 64),
    "spring-70b-fp8": (SPRING, {
        "model.flavor": "70B", "training.sequence_parallel_degree": 8, "training.fp8_linear": "dynamic",
        "training.seq_len": 4096, "activation_checkpoint.mode": "full", "training.dataset": "c4",
        "training.checkpoint_folder": "checkpoint",
    }, 64),
    # May 2024 to January 2025
    "2024-debug": (OLD, {"model.flavor": "debugmodel", "training.dataset": "c4_mini", "training.steps": 10}, 4),
    "2024-dp-degree": (OLD, {
        "training.data_parallel_replicate_degree": None, "training.data_parallel_shard_degree": None,
        "training.data_parallel_degree": -1,
    }, 8),
    "2024-8b": (OLD, {}, 8),
    "2024-8b-compile-float8": (OLD, {**FLOAT8, "training.compile": True}, 8),
    "2024-8b-hsdp": (OLD, {"training.data_parallel_replicate_degree": 2, "training.data_parallel_shard_degree": 4}, 8),
    "2024-8b-ddp": (OLD, {"training.data_parallel_replicate_degree": 8, "training.data_parallel_shard_degree": 1}, 8),
    "2024-8b-cp": (OLD, {
        "experimental.context_parallel_degree": 4, "training.seq_len": 131_072, "training.batch_size": 1,
    }, 16),
    "2024-llama2-7b": (OLD, {"model.name": "llama2", "model.flavor": "7B", "training.seq_len": 2048}, 8),
    "2024-llama2-13b": (OLD, {"model.name": "llama2", "model.flavor": "13B", "training.seq_len": 4096}, 64),
    "2024-llama2-70b": (OLD, {"model.name": "llama2", "model.flavor": "70B", "training.tensor_parallel_degree": 8}, 64),
    "2024-70b": (OLD, {
        "model.flavor": "70B", "training.tensor_parallel_degree": 8, "training.batch_size": 8, "optimizer.lr": 1.5e-4,
        "activation_checkpoint.mode": "full", "checkpoint.enable_checkpoint": True, "checkpoint.async_mode": "async",
    }, 64),
    "2024-70b-async-tp": (OLD, {
        "model.flavor": "70B", "training.tensor_parallel_degree": 8, "experimental.enable_async_tensor_parallel": True,
        "training.compile": True,
    }, 256),
    "2024-405b": (OLD, {
        "model.flavor": "405B", "training.tensor_parallel_degree": 8, "training.batch_size": 2, "training.steps": 3000,
        "training.warmup_steps": 600, "experimental.enable_async_tensor_parallel": True, "training.compile": True,
        "activation_checkpoint.mode": "full", **FLOAT8,
    }, 128),
    "2024-pipeline-1f1b": (OLD, {
        "experimental.pipeline_parallel_degree": 2, "experimental.pipeline_parallel_schedule": "1f1b",
        "experimental.pipeline_parallel_split_points": ["layers.16"],
    }, 4),
    "2024-pipeline-interleaved": (OLD, {
        "model.flavor": "debugmodel", "experimental.pipeline_parallel_degree": 2, "training.batch_size": 8,
        "experimental.pipeline_parallel_schedule": "interleaved_1f1b", "experimental.pipeline_parallel_microbatches": 8,
        "experimental.pipeline_parallel_split_points": "layers.2,layers.4,layers.6",
    }, 4),
    "2024-3d": (OLD, {
        "model.flavor": "405B", "training.tensor_parallel_degree": 8, "experimental.pipeline_parallel_degree": 8,
        "experimental.pipeline_parallel_schedule": "Interleaved1F1B", "training.batch_size": 32, "training.compile": True,
    }, 512),
    "2024-4d": (OLD, {
        "model.flavor": "405B", "training.tensor_parallel_degree": 8, "experimental.pipeline_parallel_degree": 8,
        "experimental.context_parallel_degree": 2, "training.batch_size": 8,
        "experimental.pipeline_parallel_schedule": "GPipe",
    }, 512),
    # February to June 2025
    "2025-debug": (MIDDLE, {}, 1),
    "2025-flex-attention": (MIDDLE, {"model.flavor": "debugmodel_flex_attn"}, 8),
    "2025-8b-rowwise": (MIDDLE, {
        "model.flavor": "8B", "model.converters": "float8", "float8.recipe_name": "rowwise", "training.compile": True,
        "float8.filter_fqns": "output", "training.batch_size": 1, "training.seq_len": 8192, "training.dataset": "c4",
    }, 8),
    "2025-8b-mx": (MIDDLE, {"model.flavor": "8B", "model.converters": ["mx"], "training.compile": True}, 8),
    "2025-70b-hsdp": (MIDDLE, {
        "model.flavor": "70B", "model.converters": ["float8"], **GATHERED, "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.tensor_parallel_degree": 8, "activation_checkpoint.mode": "full",
    }, 128),
    "2025-405b": (MIDDLE, {
        "model.flavor": "405B", "model.converters": "float8", **GATHERED, "float8.filter_fqns": "output",
        "parallelism.tensor_parallel_degree": 8, "parallelism.enable_async_tensor_parallel": True, "training.compile": True,
        "activation_checkpoint.mode": "full", "training.batch_size": 2, "training.seq_len": 8192,
    }, 128),
    "2025-zero-bubble": (MIDDLE, {
        "model.flavor": "8B", "parallelism.pipeline_parallel_degree": 4, "training.batch_size": 8,
        "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble", "activation_checkpoint.mode": "none",
    }, 8),
    "2025-layers-per-stage": (MIDDLE, {
        "model.flavor": "405B", "parallelism.pipeline_parallel_degree": 8, "training.batch_size": 8,
        "parallelism.pipeline_parallel_schedule": "Interleaved1F1B", "parallelism.pipeline_parallel_layers_per_stage": 4,
    }, 64),
    "2025-5d": (MIDDLE, {
        "model.flavor": "70B", "parallelism.pipeline_parallel_degree": 2, "parallelism.tensor_parallel_degree": 2,
        "parallelism.context_parallel_degree": 2, "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.data_parallel_shard_degree": 2, "parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble",
        "activation_checkpoint.mode": "none",
    }, 32),
    "2025-cpu-offload": (MIDDLE, {"training.enable_cpu_offload": True, "parallelism.tensor_parallel_degree": 2}, 8),
    # July to September 2025
    "summer-8b": (LATE, {}, 8),
    "summer-debug": (LATE, {"model.flavor": "debugmodel", "training.dataset": "c4_test"}, 4),
    "summer-validation": (LATE, {"validation.enabled": True}, 8),
    "summer-accumulation": (LATE, {"training.global_batch_size": 64}, 8),
    "summer-start-from-hf": (LATE, {
        "checkpoint.enable_checkpoint": True, "checkpoint.initial_load_in_hf": True,
        "checkpoint.initial_load_path": "./assets/hf/Llama-3.1-8B", "checkpoint.last_save_in_hf": True,
    }, 8),
    "summer-memory-budget": (LATE, {
        "activation_checkpoint.mode": "memory_budget", "activation_checkpoint.memory_budget": 0.3, "compile.enable": True,
    }, 8),
    "summer-modules-per-part": (LATE, {
        "model.flavor": "debugmodel", "parallelism.pipeline_parallel_degree": 2,
        "parallelism.module_fqns_per_model_part": [
            ["tok_embeddings", "layers.0", "layers.1"],
            ["layers.2", "layers.3", "layers.4", "layers.5", "norm", "output"],
        ], "training.local_batch_size": 8, "training.dataset": "c4_test",
    }, 4),
    "summer-405b": (LATE, {
        "model.flavor": "405B", "model.converters": ["float8"], **{key: value for key, value in GATHERED.items() if value},
        "parallelism.tensor_parallel_degree": 8, "parallelism.enable_async_tensor_parallel": True, "compile.enable": True,
        "activation_checkpoint.mode": "full",
    }, 128),
    "summer-mx": (LATE, {"model.converters": ["mx"], "compile.enable": True}, 8),
    # October 2025 to January 2026
    "end-debug": (LAST, {}, 2),
    "end-varlen": (LAST, {"model.flavor": "debugmodel_varlen_attn"}, 2),
    "end-8b-float8": (LAST, {
        "model.flavor": "8B", "model.converters": ["quantize.linear.float8"], "compile.enable": True,
        "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": True,
        "quantize.linear.float8.filter_fqns": ["output", "auto_filter_small_kn"],
    }, 8),
    "end-8b-mx": (LAST, {"model.flavor": "8B", "model.converters": ["quantize.linear.mx"], "compile.enable": True}, 8),
    "end-70b-validated": (LAST, {
        "model.flavor": "70B", "parallelism.tensor_parallel_degree": 8, "checkpoint.enable": True, "validation.enable": True,
        "checkpoint.async_mode": "async_with_pinned_mem", "metrics.enable_wandb": True,
    }, 64),
    "end-dual-pipe": (LAST, {
        "model.flavor": "8B", "parallelism.pipeline_parallel_degree": 4, "activation_checkpoint.mode": "none",
        "parallelism.pipeline_parallel_schedule": "DualPipeV",
    }, 8),
}  # fmt: skip
"""Shapes of recipes: generation, keys that differ from its recipe in tests/torchtitan, and a number of ranks."""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of TorchTitan's repository that recipes name: tokenizers and datasets."""
    import base64

    from tokenizers import Tokenizer, models

    ranks = "\n".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256))
    for file in ("torchtitan/datasets/tokenizer/original/tokenizer.model", "tests/assets/test_tiktoken.model"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(ranks)
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    for folder in (
        "assets/hf/Llama-3.1-8B", "tests/assets/tokenizer", "torchtrain/datasets/tokenizer",
        "torchtitan/datasets/tokenizer/original",
    ):  # fmt: skip
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(tmp_path / folder / "tokenizer.json"))
        (tmp_path / folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    for folder in ("tests/assets/c4_test", "torchtitan/datasets/c4_mini"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "data.json").write_text('{"text": "a"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("shape", SHAPES)
def test_a_recipe_imports_and_is_valid(shape: str, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generation, changes, world_size = SHAPES[shape]
    old = changed(repository / "old.toml", generation, changes)
    assert main(["config", "import", str(old), "--output", "new.toml"]) == 0, capsys.readouterr().err
    status = main(["config", "check", "new.toml", "--world-size", str(world_size), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert json.loads(out)["world_size"] == world_size


@pytest.mark.parametrize(
    ("generation", "changes"),
    [
        (OLD, {"model.norm_type": "np_layernorm"}),
        (OLD, {"checkpoint.enable_checkpoint": True, "checkpoint.interval_type": "seconds", "checkpoint.interval": 600}),
        (OLD, {**FLOAT8, "float8.scaling_type_weight": "delayed"}),
        (MIDDLE, {"experimental.custom_import": "mine.models", "optimizer.early_step_in_backward": True}),
        (MIDDLE, {"fault_tolerance.enable": True, "fault_tolerance.group_size": 2}),
        (LATE, {"training.dtype": "bfloat16", "training.varlen": True}),
        (LATE, {"fault_tolerance.enable": True, "fault_tolerance.semi_sync_method": "diloco"}),
        (LATE, {"validation.enabled": True, "validation.seq_len": 2048}),
        (
            LAST,
            {
                "model.converters": ["quantize.linear.float8", "mine"],
                "checkpoint.enable": True,
                "checkpoint.load_only": True,
            },
        ),
        (LAST, {"metrics.save_tb_folder": "/logs"}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else value,
)
def test_a_recipe_with_unsupported_keys_is_valid_without_them(
    generation: str, changes: dict[str, Any], repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = changed(repository / "old.toml", generation, changes)
    assert main(["config", "import", str(old), "--output", "new.toml"]) == 1
    assert "unsupported" in capsys.readouterr().err
    assert main(["config", "check", "new.toml", "--world-size", "8"]) == 0, capsys.readouterr().err


def keys_of(schema: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the schema of every dotted key."""
    definitions, found = schema["$defs"], {}

    def walk(properties: dict[str, Any], prefix: str) -> None:
        for name, entry in properties.items():
            found[f"{prefix}{name}"] = entry
            options = [entry, *entry.get("anyOf", [])]
            for option in options:
                if "$ref" in option:
                    option = definitions[option["$ref"].rpartition("/")[2]]
                if "properties" in option:
                    walk(option["properties"], f"{prefix}{name}.")

    walk(schema["properties"], prefix)
    return found


def test_every_key_that_an_import_writes_exists(repository: Path) -> None:
    known = keys_of(json_schema(Registry.from_installed()))
    written: set[str] = set()
    for generation, changes, _ in SHAPES.values():
        outcome = import_recipe(read(str(changed(repository / "old.toml", generation, changes))), ["llama3"])
        written |= outcome.values.keys()
    assert written <= known.keys()
    assert len(written) > 90


def test_the_keys_that_tell_titans_recipes_apart_are_titans() -> None:
    known = keys_of(json_schema(Registry.from_installed())).keys()
    assert known >= TITAN_ONLY
    assert known & ALIASES.keys() == SHARED


DEFAULTS = {
    "optimizer.name": "AdamW", "optimizer.lr": 8e-4, "optimizer.beta1": 0.9, "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1, "lr_scheduler.warmup_steps": 200,
    "lr_scheduler.decay_type": "linear", "lr_scheduler.min_lr_factor": 0.0, "lr_scheduler.decay_ratio": None,
    "training.local_batch_size": 8, "training.global_batch_size": -1, "training.seq_len": 2048,
    "training.max_norm": 1.0, "training.enable_cpu_offload": False, "metrics.log_freq": 10,
    "parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": -1,
    "parallelism.tensor_parallel_degree": 1, "parallelism.pipeline_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1, "parallelism.fsdp_reshard_after_forward": "default",
    "parallelism.disable_loss_parallel": False, "parallelism.enable_async_tensor_parallel": False,
    "parallelism.context_parallel_rotate_method": "allgather", "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.pipeline_parallel_microbatch_size": 1, "checkpoint.enable": False, "checkpoint.interval": 500,
    "checkpoint.folder": "checkpoint", "checkpoint.export_dtype": "float32", "checkpoint.async_mode": "disabled",
    "checkpoint.load_step": -1, "checkpoint.initial_load_model_only": True, "checkpoint.keep_latest_k": 10,
    "checkpoint.last_save_model_only": False, "activation_checkpoint.memory_budget": 0.5, "compile.enable": False,
    "compile.components": ["model", "loss"], "compile.backend": "inductor", "validation.enable": False,
    "validation.steps": -1, "float8.recipe_name": "tensorwise", "float8.enable_fsdp_float8_all_gather": False,
    "profiling.profiler_active": 1, "profiling.profiler_warmup": 3, "profiling.enable_profiling": False,
}  # fmt: skip
"""Defaults of TorchTitan, in every generation that has the key, that Titan shares."""


def test_a_key_that_is_not_written_has_torchtitans_default() -> None:
    """An import does not write what Titan does by default. Should a default change, the import must write it."""
    assert KEYS.keys() - ALIASES.keys() >= DEFAULTS.keys()
    schema = keys_of(json_schema(Registry.from_installed()))
    assert {key: schema[key].get("default") for key in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("name", "flavor", "parameters"),
    [
        ("llama2", "7B", 6_738_415_616),
        ("llama2", "13B", 13_015_864_320),
        ("llama2", "70B", 68_976_648_192),
        ("llama3", "8B", 8_030_261_248),
        ("llama3", "70B", 70_553_706_496),
        ("llama3", "405B", 405_853_388_800),
    ],
)
def test_an_imported_model_has_the_published_size(name: str, flavor: str, parameters: int) -> None:
    values = imported({"model.name": name, "model.flavor": flavor, "debug.seed": 1}).values
    changes = {key.removeprefix("model.args."): value for key, value in values.items() if key.startswith("model.args.")}
    args = FLAVORS[values["model.flavor"]].model_copy(update=changes)
    assert args.num_params == parameters
    assert (args.rope_scaling is None) == (name == "llama2")


@pytest.mark.parametrize("generation", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_an_imported_recipe_is_plain_toml(generation: str, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = changed(repository / "old.toml", generation, {})
    assert main(["config", "import", str(old)]) == 0
    assert tomli.loads(capsys.readouterr().out)["model"]["name"] == "llama3"
