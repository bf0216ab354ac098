"""Measures TorchTitan (0.3, by its Python configs) on the model and batch of the other configurations, in a process of its
own.

Its language models always mask attention by documents, with FlexAttention, so compare it with Titan's rows with document
masks. Its data is Python's standard library, as Titan's, cut into bytes by a tokenizer that is made here.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import Case, Plan
from benchmarks.gpu.child import job_of
from benchmarks.gpu.meter import Measurement, Meter
from titan_debug.peak_flops import peak_flops

_DOCUMENTS = 400


def config_of(case: Case, plan: Plan, folder: Path) -> Any:
    """Return TorchTitan's config of ``case``: its own for Llama 3.1 8B, with fewer layers and without what the other
    configurations do not do either.

    Raises:
        ImportError: TorchTitan, or a version whose configs are Python functions, is not installed.
    """
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_8b

    settings = plan.settings
    config = llama3_8b()
    if case.settings.get("float8"):
        config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(model_compile_enabled=True)])
    model = config.model_spec.model
    model.layers = model.layers[: int(settings["model.args.n_layers"])]
    config.hf_assets_path = str(_tokenizer(folder / "tokenizer"))
    config.dump_folder = str(folder / "torchtitan")
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset=_register_dataset())
    training = config.training
    training.steps, training.seq_len = plan.all_steps, int(settings["training.seq_len"])
    training.local_batch_size = int(settings["training.local_batch_size"])
    training.global_batch_size = int(settings["training.global_batch_size"])
    config.compile = CompileConfig(enable=True, backend=plan.backend)
    recompute = {"selective": SelectiveAC, "full": FullAC}.get(case.settings.get("recompute", ""))
    config.activation_checkpoint = recompute.Config() if recompute is not None else None
    config.metrics.enable_tensorboard, config.metrics.log_freq = False, 10**6
    config.profiler.enable_profiling = False
    config.checkpoint.enable = config.validator.enable = False
    return config


def _register_dataset() -> str:
    """Add Python's standard library to TorchTitan's datasets; return its name."""
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    def load(path: str) -> Any:
        files = sorted(Path(path).rglob("*.py"))[:_DOCUMENTS]
        return Dataset.from_dict({"text": [file.read_text(encoding="utf-8", errors="replace") for file in files]})

    DATASETS["stdlib"] = DatasetConfig(sysconfig.get_path("stdlib"), load, lambda sample: sample["text"])
    return "stdlib"


def _tokenizer(folder: Path) -> Path:
    """Write a tokenizer whose tokens are bytes, in the format of Hugging Face; return ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<begin>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special), encoding="utf-8")
    return folder


def measure(case: Case, plan: Plan, started: float, folder: Path) -> Measurement:
    """Run TorchTitan's trainer, with a meter around its steps."""
    from torchtitan.tools.logging import init_logger

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))
    init_logger()
    trainer = config_of(case, plan, folder).build()
    device = torch.device(plan.device)
    meter = Meter(device, started, plan.warmup, plan.steps, plan.probes)
    original = trainer.train_step

    def step(*arguments: Any, **keywords: Any) -> Any:
        meter.begin(trainer.step)
        result = original(*arguments, **keywords)
        meter.end(trainer.step)
        return result

    trainer.train_step = step
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
    job = job_of(case, plan, str(folder / "titan"))
    flops = job.model.flops_per_token(job.batch.seq_len)
    return meter.result(job.batch.tokens_per_step, flops, peak_flops(device, torch.bfloat16))


def main() -> None:
    """Read the case, measure it, and write the result to the file given as the second argument."""
    given = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="titan-gpu-") as folder:
        found = measure(Case(**given["case"]), Plan(**given["plan"]), float(sys.argv[3]), Path(folder))
    Path(sys.argv[2]).write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
