"""Checks that torchtune loads exported folders with its own Hugging Face checkpointer, and computes Titan's logits.

For each case, random weights are imported from a ``torch.distributed.checkpoint`` folder and exported by
``titan checkpoint convert``. torchtune runs in an environment of its own (``torchtune_logits.py``), because it needs
an older torch. The control is the difference if torchtune's RoPE has another base: the comparison would notice it.

    uv run python benchmarks/compat/torchtune_export.py [--python PYTHON]

``--python`` is an interpreter that has torchtune; by default `uv run` makes an environment (a download of 3 GB).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from titan_ckpt.foreign import exporting
from titan_core.api.config.resolved import Override
from titan_core.cli.main import main as titan
from titan_core.cli.stored_models import InstalledModels
from titan_core.plugins.registry import Components
from titan_models_llama.config import LlamaArgs
from titan_models_llama.layout import define

NEEDS = ("torchtune==0.6.1", "torchao==0.9.0", "torch==2.6.0", "setuptools")
"""torchao 0.9 imports setuptools, and does not declare it."""
SIZE: dict[str, Any] = {"dim": 256, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 640, "vocab_size": 512}
SCALED: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
"""torchtune's Llama 3.1 has no other values."""
CASES: dict[str, dict[str, Any]] = {
    "Llama 3": {"rope_scaling": None},
    "Llama 3.1: scaled RoPE": {"rope_scaling": {"factor": 8.0, **SCALED}},
    "Llama 3.1, 4 files": {"rope_scaling": {"factor": 8.0, **SCALED}},
    "Llama 3.2: tied output": {"rope_scaling": {"factor": 32.0, **SCALED}, "tie_embeddings": True},
}
LENGTH = 1024
BOUND = 1e-4
"""Largest accepted difference, as a fraction of the logits' standard deviation."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", metavar="PYTHON", help="interpreter of an environment with torchtune")
    python = parser.parse_args().python
    isolated = ["uv", "run", "--isolated", "--no-project", *(part for need in NEEDS for part in ("--with", need)), "python"]
    torch.set_num_threads(1)
    rows, failed = [], False
    versions = ""
    for name, differences in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            ours, tokens = export(LlamaArgs(**SIZE, **differences, max_seq_len=LENGTH), Path(folder), "4 files" in name)
            torch.save(tokens, f"{folder}/tokens.pt")
            child = Path(__file__).with_name("torchtune_logits.py")
            command = [python] if python else isolated
            files = [f"{folder}/hf", f"{folder}/tokens.pt", f"{folder}/logits.pt"]
            environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
            subprocess.run([*command, str(child), *files], check=True, env=environment, stdout=sys.stderr)
            theirs = torch.load(f"{folder}/logits.pt", weights_only=True)
            exported = len(list(Path(folder, "hf").glob("*.safetensors")))
        versions = theirs["versions"]
        spread = ours.std()
        difference, control = (((theirs[key] - ours).abs().max() / spread).item() for key in ("logits", "control"))
        failed |= not difference < BOUND < control / 100
        rows.append(f"| {name} | {exported} | {difference:.1e} | {control:.1e} |")
    print(f"Titan with torch {torch.__version__}; {versions}\n")
    print("| model | files | largest difference of logits / their standard deviation | control |\n| --- | --- | --- | --- |")
    print("\n".join(rows))
    return int(failed)


def export(args: LlamaArgs, folder: Path, several_files: bool) -> tuple[Tensor, Tensor]:
    """Export a model with random weights to ``folder / "hf"``. Returns Titan's logits and the tokens."""
    generator = torch.Generator().manual_seed(0)
    state = {
        name: 1 + 0.2 * torch.randn(value.shape, generator=generator)
        if value.dim() == 1
        else torch.randn(value.shape, generator=generator) * value.shape[1] ** -0.5
        for name, value in define(args).build().state_dict().items()
        if not (args.tie_embeddings and name == "output.weight")
    }
    with warnings.catch_warnings(action="ignore"):  # of saving without a process group
        save(dict(state), storage_writer=FileSystemWriter(folder / "dcp"))
    described = [
        f"--model.args.{key}={toml(value)}" for key, value in args.model_dump(mode="json").items() if value is not None
    ]
    convert = ["checkpoint", "convert", str(folder / "dcp"), str(folder / "titan"), "--allow-pickle", *described]
    exporting.FILE_BYTES = 3_000_000 if several_files else 5 * 10**9
    for command in (convert, ["checkpoint", "convert", str(folder / "titan"), str(folder / "hf")]):
        if titan(command):
            raise SystemExit("titan checkpoint convert failed")
    tokens = torch.randint(0, args.vocab_size, (2, LENGTH), generator=generator)
    models = InstalledModels(
        Components.from_installed(), [Override("model.tokenizer", "byte"), Override("job.device", "cpu")]
    )
    stored = models.find(str(folder / "titan"))
    with models.open(models.job(stored), stored) as loaded:
        return loaded.part.module(tokens).float(), tokens


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
