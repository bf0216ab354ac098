"""Recipes of TorchTitan, of every shape that its last TOML generation had, import and pass ``titan config check``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.old_recipes import changed, imported
from titan_completion.schema import json_schema
from titan_core.cli.main import main
from titan_core.plugins.registry import Components
from titan_models_llama.config import FLAVORS
from titan_torchtitan.importing import import_recipe
from titan_torchtitan.reading import read
from titan_torchtitan.rules import RULES

FLOAT8 = {
    "model.converters": ["quantize.linear.float8"], "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": True,
}  # fmt: skip
PIPELINE, DEGREE = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_degree"

SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "debug": ({}, 2),
    "varlen": ({"model.flavor": "debugmodel_varlen_attn"}, 2),
    "hsdp": ({"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 4}, 8),
    "ddp": ({"parallelism.data_parallel_replicate_degree": 8, "parallelism.data_parallel_shard_degree": 1}, 8),
    "context-parallel": ({
        "model.flavor": "8B", "parallelism.context_parallel_degree": 4, "training.seq_len": 131_072,
        "training.local_batch_size": 1,
    }, 16),
    "accumulation": ({"training.global_batch_size": 64}, 8),
    "8b-float8": ({
        "model.flavor": "8B", **FLOAT8, "compile.enable": True,
        "quantize.linear.float8.filter_fqns": ["output", "auto_filter_small_kn"],
    }, 8),
    "8b-rowwise": ({"model.flavor": "8B", **FLOAT8, "quantize.linear.float8.recipe_name": "rowwise"}, 8),
    "8b-mx": ({"model.flavor": "8B", "model.converters": ["quantize.linear.mx"], "compile.enable": True}, 8),
    "start-from-hf": ({
        "model.flavor": "8B", "checkpoint.enable": True, "checkpoint.initial_load_in_hf": True,
        "checkpoint.initial_load_path": "./assets/hf/Llama-3.1-8B", "checkpoint.last_save_in_hf": True,
    }, 8),
    "memory-budget": ({
        "activation_checkpoint.mode": "memory_budget", "activation_checkpoint.memory_budget": 0.3, "compile.enable": True,
    }, 8),
    "cpu-offload": ({"training.enable_cpu_offload": True, "parallelism.tensor_parallel_degree": 2}, 8),
    "70b-validated": ({
        "model.flavor": "70B", "parallelism.tensor_parallel_degree": 8, "checkpoint.enable": True, "validation.enable": True,
        "checkpoint.async_mode": "async_with_pinned_mem", "metrics.enable_wandb": True,
    }, 64),
    "405b": ({
        "model.flavor": "405B", **FLOAT8, "parallelism.tensor_parallel_degree": 8, "compile.enable": True,
        "parallelism.enable_async_tensor_parallel": True, "activation_checkpoint.mode": "full",
    }, 128),
    "405b-layers-per-stage": ({
        "model.flavor": "405B", DEGREE: 8, PIPELINE: "Interleaved1F1B", "parallelism.pipeline_parallel_layers_per_stage": 4,
    }, 64),
    "5d": ({
        "model.flavor": "70B", DEGREE: 2, "parallelism.tensor_parallel_degree": 2, "parallelism.context_parallel_degree": 2,
        "parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 2,
        PIPELINE: "InterleavedZeroBubble", "activation_checkpoint.mode": "none",
    }, 32),
    "dual-pipe": ({"model.flavor": "8B", DEGREE: 4, PIPELINE: "DualPipeV", "activation_checkpoint.mode": "none"}, 8),
    "modules-per-part": ({
        DEGREE: 2, "parallelism.module_fqns_per_model_part": [
            ["tok_embeddings", "layers.0", "layers.1"],
            ["layers.2", "layers.3", "layers.4", "layers.5", "norm", "output"],
        ],
    }, 4),
}  # fmt: skip
"""Shapes of recipes: keys that differ from the recipe in tests/torchtitan, and a number of ranks."""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of TorchTitan's repository that recipes name: tokenizers and datasets."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    for folder in ("assets/hf/Llama-3.1-8B", "tests/assets/tokenizer"):
        (tmp_path / folder).mkdir(parents=True)
        tokenizer.save(str(tmp_path / folder / "tokenizer.json"))
        (tmp_path / folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (tmp_path / "tests/assets/c4_test").mkdir()
    (tmp_path / "tests/assets/c4_test/data.json").write_text('{"text": "a"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("shape", SHAPES)
def test_a_recipe_imports_and_is_valid(shape: str, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, world_size = SHAPES[shape]
    old = changed(repository / "old.toml", changes)
    assert main(["config", "import", str(old), "--output", "new.toml"]) == 0, capsys.readouterr().err
    status = main(["config", "check", "new.toml", "--world-size", str(world_size), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert json.loads(out)["world_size"] == world_size


@pytest.mark.parametrize(
    "changes",
    [
        {"training.dtype": "bfloat16", "training.varlen": True},
        {"experimental.custom_import": "mine.models", "optimizer.early_step_in_backward": True},
        {"fault_tolerance.enable": True, "fault_tolerance.semi_sync_method": "diloco"},
        {"validation.enable": True, "validation.seq_len": 1024},
        {"model.converters": ["quantize.linear.float8", "mine"], "checkpoint.enable": True, "checkpoint.load_only": True},
        {"metrics.save_tb_folder": "/logs"},
    ],
    ids=",".join,
)
def test_a_recipe_with_unsupported_keys_is_valid_without_them(
    changes: dict[str, Any], repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = changed(repository / "old.toml", changes)
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
    known = keys_of(json_schema(Components.from_installed()))
    written: set[str] = set()
    for changes, _ in SHAPES.values():
        outcome = import_recipe(read(str(changed(repository / "old.toml", changes))), ["llama3"])
        written |= outcome.values.keys()
    assert written <= known.keys()
    assert len(written) > 90


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
"""Defaults of TorchTitan that Titan shares, by Titan's name."""


def test_a_key_that_is_not_written_has_torchtitans_default() -> None:
    """An import does not write what Titan does by default. Should a default change, the import must write it."""
    assert {rule.to for rule in RULES.values()} | {"float8.enable_fsdp_float8_all_gather"} >= DEFAULTS.keys()
    schema = keys_of(json_schema(Components.from_installed()))
    assert {key: schema[key].get("default") for key in DEFAULTS} == DEFAULTS


def test_an_imported_debug_model_has_the_published_size() -> None:
    """The head and the embedding of 2048 tokens, six blocks of width 256, and the last norm."""
    values = imported({"model.flavor": "debugmodel"}).values
    changes = {key.removeprefix("model.args."): value for key, value in values.items() if key.startswith("model.args.")}
    args = FLAVORS[values["model.flavor"]].model_copy(update=changes)
    assert args.num_params == 2 * 2048 * 256 + 6 * (4 * 256 * 256 + 3 * 256 * 768 + 2 * 256) + 256
