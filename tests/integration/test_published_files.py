"""Meta's published weight files match their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from titan_ckpt.foreign.checks import require_equal_copies, require_weights
from titan_ckpt.foreign.files import MetaFiles
from titan_core.api import UserError
from titan_models_llama.config import FLAVORS, LlamaArgs
from titan_models_llama.formats import meta_args, meta_tensors
from titan_models_llama.model import Llama

COMMON = {"vocab_size": 128_256, "norm_eps": 1e-5, "rope_theta": 500_000.0, "use_scaled_rope": True}


PARAMS: dict[str, dict[str, Any]] = {
    "1B": {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.5, "multiple_of": 256},
    "3B": {"dim": 3072, "n_layers": 28, "n_heads": 24, "n_kv_heads": 8, "ffn_dim_multiplier": 1.0, "multiple_of": 256},
    "8B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.3, "multiple_of": 1024},
    "70B": {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "ffn_dim_multiplier": 1.3, "multiple_of": 4096},
    "405B": {"dim": 16384, "n_layers": 126, "n_heads": 128, "n_kv_heads": 8, "ffn_dim_multiplier": 1.2, "multiple_of": 4096},
}


def shapes(args: LlamaArgs) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Llama(args).named_parameters()}


def publish(folder: Path, args: LlamaArgs, files: int = 1) -> dict[str, torch.Tensor]:
    """Save tensors with the true shapes and Meta's names, including the tied output. On disk, each is a single number."""
    wanted = shapes(args)
    tensors: dict[str, torch.Tensor] = {}
    for one in meta_tensors(args):
        shape = list(wanted[one.parameter])
        if one.split is not None:
            shape[one.split] //= files
        tensors[one.name] = torch.full((), 0.5, dtype=torch.bfloat16).expand(shape)
    tensors["output.weight"] = torch.full((), 0.5, dtype=torch.bfloat16).expand(tensors["tok_embeddings.weight"].shape)
    for number in range(files):
        torch.save({**tensors, "rope.freqs": torch.zeros(1)}, folder / f"consolidated.{number:02d}.pth")
    return tensors


def require_fit(folder: Path, args: LlamaArgs) -> None:
    files, tensors = MetaFiles(folder), meta_tensors(args)
    wanted = {name: (shape, None) for name, shape in shapes(args).items()}
    require_weights(files, tensors, wanted, ["rope.freqs"], "here")
    require_equal_copies(files, tensors, "here")


@pytest.mark.parametrize("flavor", ["1B", pytest.param("3B", marks=pytest.mark.full)])
def test_published_files_of_a_tied_model_load(tmp_path: Path, flavor: str) -> None:
    args = meta_args(PARAMS[flavor] | COMMON)
    publish(tmp_path, args, files=2)
    require_fit(tmp_path, args)


def test_an_output_layer_that_differs_from_the_tied_embedding_is_refused(tmp_path: Path) -> None:
    """Otherwise a fine-tuned head in the files of a tied model would be lost."""
    args = FLAVORS["debug"].model_copy(update={"tie_embeddings": True, "vocab_size": 20_000})
    tensors = publish(tmp_path, args)
    changed = tensors["output.weight"].clone()
    changed[15_000, 3] = 0.25
    torch.save({**tensors, "output.weight": changed}, tmp_path / "consolidated.00.pth")
    with pytest.raises(UserError, match=r"output.weight differs from tok_embeddings.weight"):
        require_fit(tmp_path, args)
    torch.save({**tensors, "output.weight": changed[:100]}, tmp_path / "consolidated.00.pth")
    with pytest.raises(UserError, match=r"output.weight differs from tok_embeddings.weight"):
        require_fit(tmp_path, args)
    del tensors["output.weight"]
    torch.save(tensors, tmp_path / "consolidated.00.pth")
    require_fit(tmp_path, args)
