"""The rotary table equals that of the published models at every position of their context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from harness.rope_spellings import KINDS, SIZES, read_and_written
from titan_models_llama.config import FLAVORS, LlamaArgs, RopeScaling
from titan_models_llama.formats import hf_args, hf_config
from titan_models_llama.model import rope_table

CHUNK = 1 << 14


def reference(args: LlamaArgs) -> LlamaRotaryEmbedding:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rope_theta}
    if args.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3", "factor": args.rope_scaling.factor,
            "low_freq_factor": args.rope_scaling.low_freq_factor, "high_freq_factor": args.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling.original_max_seq_len,
        }  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=args.dim, num_attention_heads=args.n_heads, head_dim=args.head_dim,
        max_position_embeddings=args.max_seq_len, rope_parameters=rope,
    )  # fmt: skip
    return LlamaRotaryEmbedding(config)


def distinct() -> dict[str, LlamaArgs]:
    """Return one flavor per table: some flavors have the same head width and scaling."""
    tables = {(args.head_dim, args.rope_theta, args.rope_scaling, args.max_seq_len): name for name, args in FLAVORS.items()}
    odd = RopeScaling(factor=3.0, low_freq_factor=1.5, high_freq_factor=7.0, original_max_seq_len=1000)
    return {
        **{name: FLAVORS[name] for name in tables.values()},
        "no power of two": FLAVORS["debug"].model_copy(update={"rope_scaling": odd, "max_seq_len": 20_000}),
    }


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("name", distinct())
def test_the_table_equals_that_of_transformers_at_every_position(name: str) -> None:
    args = distinct()[name]
    ours, theirs = rope_table(args), reference(args)
    half = args.head_dim // 2
    for start in range(0, args.max_seq_len, CHUNK):
        positions = torch.arange(start, min(start + CHUNK, args.max_seq_len))
        cos, sin = theirs(torch.zeros(()), positions[None])
        torch.testing.assert_close(ours[positions, 0], cos[0, :, :half], rtol=0, atol=1e-6)
        torch.testing.assert_close(ours[positions, 1], sin[0, :, :half], rtol=0, atol=1e-6)


def test_bands_of_frequencies_must_be_in_order() -> None:
    with pytest.raises(ValidationError, match=r"low_freq_factor 4 must be less than high_freq_factor 4"):
        RopeScaling(low_freq_factor=4.0)


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_and_written_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    fewest = {"default": 78, "llama3": 60}.get(kind, 0)
    base = {"model_type": "llama", **SIZES}
    assert fewest <= read_and_written(kind, base, tmp_path, hf_args, hf_config, rope_table) <= 140 * (fewest > 0)
