"""Loads a Hugging Face folder with torchtune's own checkpointer and writes the logits of torchtune's model.
``torchtune_export.py`` runs it in an environment with torchtune, without Titan.

    python torchtune_logits.py FOLDER TOKENS.pt LOGITS.pt
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchao
import torchtune
from torchtune.models.llama3 import llama3
from torchtune.models.llama3_1 import llama3_1
from torchtune.models.llama3_2 import llama3_2
from torchtune.training import FullModelHFCheckpointer


def main() -> None:
    folder, tokens_file, logits_file = (Path(argument) for argument in sys.argv[1:])
    config = json.loads((folder / "config.json").read_text())
    build, model_type = builder(config)
    with tempfile.TemporaryDirectory() as output:
        files = sorted(file.name for file in folder.glob("*.safetensors"))
        checkpointer = FullModelHFCheckpointer(str(folder), files, model_type, output)
        weights = checkpointer.load_checkpoint()["model"]
    tokens = torch.load(tokens_file, weights_only=True)
    found: dict[str, Any] = {"versions": f"torchtune {torchtune.__version__}, torch {torch.__version__}, "
                                         f"torchao {torchao.__version__}"}  # fmt: skip
    for name, rope_base in (("logits", config["rope_theta"]), ("control", 2 * config["rope_theta"])):
        model = build(
            vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            embed_dim=config["hidden_size"],
            intermediate_dim=config["intermediate_size"],
            max_seq_len=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
            rope_base=int(rope_base),
        )
        model.load_state_dict(weights)
        with torch.no_grad():
            found[name] = model(tokens).float()
    torch.save(found, logits_file)


def builder(config: dict[str, Any]) -> tuple[Callable[..., torch.nn.Module], str]:
    """Return torchtune's builder of the model that ``config.json`` describes, and its name for the family."""
    scaling = config["rope_scaling"]
    if config["tie_word_embeddings"]:
        return lambda **sizes: llama3_2(**sizes, scale_factor=int(scaling["factor"])), "LLAMA3_2"
    if scaling is not None:
        return lambda **sizes: llama3_1(**sizes, scale_factor=int(scaling["factor"])), "LLAMA3"
    return llama3, "LLAMA3"


if __name__ == "__main__":
    main()
