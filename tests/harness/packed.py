"""Another format of the tiny model, which packs its weights as GPT-NeoX, GPT-2 and mixtures of experts pack theirs: queries,
keys and values of each head in one transposed tensor, each expert's matrices in tensors of their own, a correction in a
buffer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_core.api import ForeignTensor, Ref, WeightFormat
from titan_testing.tiny_args import TinyArgs

if TYPE_CHECKING:
    from torch import Tensor

ARGS = TinyArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=24, max_seq_len=64, experts=4)
FORMAT = WeightFormat(
    files="safetensors",
    tensors=Ref("harness.packed:tensors"),
    to_args=Ref("harness.packed:to_args"),
    from_args=Ref("harness.packed:from_args"),
)


def tensors(args: TinyArgs) -> list[ForeignTensor]:
    """Return the tensors of the other format."""
    head = args.head_dim
    found = [
        ForeignTensor("wte.weight", "tok_embeddings.weight"),
        ForeignTensor("ln_f.weight", "norm.weight"),
        ForeignTensor("lm_head.weight", "output.weight"),
    ]
    for layer in range(args.n_layers):
        ours, theirs = f"layers.{layer}", f"h.{layer}"
        for index, name in enumerate("qkv"):
            rows = range(index * head, (index + 1) * head)
            found.append(
                ForeignTensor(f"{theirs}.qkv.weight", f"{ours}.attention.w{name}.weight", rows, 3 * head, transpose=True)
            )
        experts = [f"{theirs}.experts.{expert}" for expert in range(args.experts)]
        found += [
            ForeignTensor(f"{theirs}.ln.weight", f"{ours}.attention_norm.weight"),
            ForeignTensor(f"{theirs}.post_ln.weight", f"{ours}.ffn_norm.weight"),
            ForeignTensor(f"{theirs}.proj.weight", f"{ours}.attention.wo.weight", transpose=True),
            ForeignTensor(
                f"{theirs}.experts.*.gate,up",
                f"{ours}.feed_forward.gate_up",
                pieces=tuple((f"{one}.{name}", args.ffn_dim) for one in experts for name in ("gate", "up")),
            ),
            ForeignTensor(
                f"{theirs}.experts.*.down",
                f"{ours}.feed_forward.down",
                pieces=tuple((f"{one}.down", args.dim) for one in experts),
                transpose=True,
            ),
            ForeignTensor(f"{theirs}.score_correction", f"{ours}.feed_forward.correction", buffer=True),
        ]
    return found


def to_args(config: Mapping[str, Any]) -> TinyArgs:
    """Return the arguments in a ``config.json``."""
    if config.get("model_type") != "packed":
        raise ValueError("model_type is not 'packed'")
    return TinyArgs(**{name: config[name] for name in TinyArgs.model_fields})


def from_args(args: TinyArgs) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    return {"model_type": "packed", **args.model_dump()}


def write_packed(folder: Path, args: TinyArgs = ARGS) -> dict[str, Tensor]:
    """Write a folder with random weights as the other format packs them; return them."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    dim, ffn, experts = args.dim, args.ffn_dim, range(args.experts)
    shapes = {"wte.weight": (args.vocab_size, dim), "lm_head.weight": (args.vocab_size, dim), "ln_f.weight": (dim,)}
    for layer in range(args.n_layers):
        shapes |= {f"h.{layer}.qkv.weight": (dim, 3 * dim), f"h.{layer}.proj.weight": (dim, dim)}
        shapes |= {
            f"h.{layer}.ln.weight": (dim,),
            f"h.{layer}.post_ln.weight": (dim,),
            f"h.{layer}.score_correction": (len(experts),),
        }
        shapes |= {f"h.{layer}.experts.{one}.{name}": (ffn, dim) for one in experts for name in ("gate", "up")}
        shapes |= {f"h.{layer}.experts.{one}.down": (ffn, dim) for one in experts}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(from_args(args)))
    return tensors
