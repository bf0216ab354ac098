"""Mistakes in the Qwen3 models and their format. Those in what they share with Llama are in ``models_llama.py``."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

QWEN3, FORMATS = "tests/models_qwen3/test_qwen3.py", "tests/models_qwen3/test_formats.py"
CONFIG, MODEL, FORMAT = (f"models-qwen3/{name}.py" for name in ("config", "model", "formats"))
DECODER, ROTARY = "core/toolkit/decoder.py", "core/toolkit/rotary.py"

MUTANTS = (
    Mutant("qwen3-keys-not-normed", DECODER, "q, k = self.q_norm(q), self.k_norm(k)", "q = self.q_norm(q)", (QWEN3,)),
    Mutant("qwen3-norms-swapped", DECODER, "q, k = self.q_norm(q), self.k_norm(k)", "q, k = self.k_norm(q), self.q_norm(k)", (QWEN3,)),
    Mutant("qwen3-heads-as-wide-as-the-model", DECODER, "q_dim, kv_dim = args.n_heads * args.head_dim,", "q_dim, kv_dim = args.dim,", (QWEN3,)),
    Mutant("qwen3-pairs-of-neighbours", MODEL, "GroupedQueryAttention(args, rotate_halves,", "GroupedQueryAttention(args, lambda x, rope: rotate_halves(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), rope),", (QWEN3,)),
    Mutant("qwen3-halves-swapped", ROTARY, "torch.cat(_rotated(first, second, rope), dim=-1)", "torch.cat(_rotated(second, first, rope), dim=-1)", (QWEN3,)),
    Mutant("qwen3-norms-not-counted", CONFIG, " + 2 * self.head_dim\n", "\n", (QWEN3,)),
    Mutant("qwen3-flops-of-the-width", CONFIG, "self.n_layers * self.n_heads * self.head_dim * seq_len", "self.n_layers * self.dim * seq_len", (QWEN3,)),
    Mutant("qwen3-odd-heads-accepted", CONFIG, "if self.head_dim % 2:", "if False:", (QWEN3,)),
    Mutant("qwen3-windows-ignored", FORMAT, 'if flag(config, "use_sliding_window"):', "if False:", (FORMATS,)),
    Mutant("qwen3-windows-of-layers-ignored", FORMAT, "all(kind == _FULL for kind in kinds)", "True", (FORMATS,)),
    Mutant("qwen3-norms-not-written", FORMAT, '    "attention.k_norm": "self_attn.k_norm",\n', "", (FORMATS,)),
    Mutant("qwen3-scaling-ignored", FORMAT, '    rope_type(config, "default")\n', "", (FORMATS,)),
)  # fmt: skip
