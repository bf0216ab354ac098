"""Mistakes in the Qwen3 models and their format. Those in what they share with Llama are in ``models_llama.py``."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

QWEN3, FORMATS = "tests/models_qwen3/test_qwen3.py", "tests/models_qwen3/test_formats.py"
CONFIG, MODEL, FORMAT = (f"models-qwen3/{name}.py" for name in ("config", "model", "formats"))
DECODER, ROTARY = "core/toolkit/decoder.py", "core/toolkit/rotary.py"
MOE, MOE_FORMATS = "tests/models_qwen3/test_qwen3_moe.py", "tests/models_qwen3/test_moe_formats.py"
MOE_CONFIG, MOE_MODEL, MOE_LAYOUT, MOE_FORMAT = (
    f"models-qwen3/moe_{name}.py" for name in ("config", "model", "layout", "formats")
)

MUTANTS = (
    Mutant("qwen3-moe-weights-with-the-bias", MOE_MODEL, "weights = scores.gather(1, chosen)", "weights = (scores if self.choice.bias is None else scores + self.choice.bias).gather(1, chosen)", (MOE,)),
    Mutant("qwen3-moe-always-normed", MOE_MODEL, "if self.norm:", "if True:", (MOE,)),
    Mutant("qwen3-moe-never-scaled", MOE_MODEL, "return weights * self.scale, chosen, scores", "return weights, chosen, scores", (MOE,)),
    Mutant("qwen3-moe-routed-in-bf16", MOE_MODEL, "F.linear(tokens.flatten(0, -2).float(), self.weight.float())", "F.linear(tokens.flatten(0, -2), self.weight.to(tokens.dtype)).float()", (MOE,)),
    Mutant("qwen3-moe-softmax-always", MOE_MODEL, "logits.sigmoid() if self.sigmoid else", "logits.softmax(-1) if self.sigmoid else", (MOE,)),
    Mutant("qwen3-moe-gate-and-up-swapped", MOE_MODEL, "F.silu(gate) * up", "F.silu(up) * gate", (MOE,)),
    Mutant("qwen3-moe-shared-ignored", MOE_MODEL, "result if self.shared is None else result + self.shared(x)", "result", (MOE,)),
    Mutant("qwen3-moe-shared-not-counted", MOE_CONFIG, "(experts * self.expert_dim + self.shared_dim)", "experts * self.expert_dim", (MOE,)),
    Mutant("qwen3-moe-flops-of-all-experts", MOE_CONFIG, "return self.num_active_params - (0", "return self.num_params - (0", (MOE,)),
    Mutant("qwen3-moe-blocks-cost-the-same", MOE_LAYOUT, "if args.n_dense_layers else (),", "if False else (),", (MOE,)),
    Mutant("qwen3-moe-experts-start-shallow", MOE_LAYOUT, 'initial_values(args, "feed_forward.*w[23]*")', "initial_values(args)", (MOE,)),
    Mutant("qwen3-moe-normed-by-default", MOE_FORMAT, 'norm_weights=flag(config, "norm_topk_prob")', 'norm_weights=config.get("norm_topk_prob", True)', (MOE_FORMATS,)),
    Mutant("qwen3-moe-every-second-layer", MOE_FORMAT, "if step != 1:", "if False:", (MOE_FORMATS,)),
    Mutant("qwen3-moe-any-dense-layers", MOE_FORMAT, "if dense != list(range(len(dense))):", "if False:", (MOE_FORMATS,)),
    Mutant("qwen3-moe-deepseek-exported", MOE_FORMAT, "if ours[name] != value:", "if False:", (MOE_FORMATS,)),
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
