"""Mistakes in the Qwen3 models and their format. Those in what they share with Llama are in ``models_llama.py``."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

QWEN3, FORMATS = "tests/models_qwen3/test_qwen3.py", "tests/models_qwen3/test_formats.py"
CONFIG, FORMAT, LAYOUT = (f"models-qwen3/{name}.py" for name in ("config", "formats", "layout"))
BLOCK, ROTARY = "nn/decoder.py", "nn/rotary.py"
MOE, MOE_FORMATS = "tests/models_qwen3/test_qwen3_moe.py", "tests/models_qwen3/test_moe_formats.py"
MOE_CONFIG, MOE_MODEL, MOE_LAYOUT, MOE_FORMAT = (
    f"models-qwen3/moe_{name}.py" for name in ("config", "model", "layout", "formats")
)
MTP, MTP_MODEL = (f"models-qwen3/{name}.py" for name in ("mtp", "model"))
MTP_TESTS, MTP_MESHES = (
    "tests/models_qwen3/test_multi_token_prediction.py",
    "tests/integration/test_multi_token_prediction.py",
)

MUTANTS = (
    Mutant("mtp-states-after-the-final-norm", MTP_MODEL, "states.append(block(embedded, rope, documents, states[-1]))", "states.append(block(embedded, rope, documents, self.norm(states[-1])))", (MTP_TESTS,)),
    Mutant("mtp-embedding-and-states-swapped", MTP_MODEL, "(self.enorm(x), self.hnorm(previous))", "(self.hnorm(previous), self.enorm(x))", (MTP_TESTS,)),
    Mutant("mtp-depths-from-the-last-block", MTP_MODEL, "documents, states[-1])", "documents, states[0])", (MTP_TESTS,)),
    Mutant("mtp-one-final-norm", MTP_MODEL, "*(norm(one) for norm,", "*(self.mtp[0](one) for _,", (MTP_TESTS,)),
    Mutant("mtp-beyond-documents", MTP, "if batch.documents is not None:", "if False:", (MTP_TESTS,)),
    Mutant("mtp-weights-of-this-position", MTP, "later(weights, 0)", "torch.where(targets != IGNORE, weights, 0.0)", (MTP_TESTS,)),
    Mutant("mtp-sum-over-depths", MTP, "self._weight / len(later) * term", "self._weight * term", (MTP_TESTS,)),
    Mutant("mtp-in-evaluations", MTP, "if torch.is_grad_enabled():", "if True:", (MTP_TESTS,)),
    Mutant("mtp-shared-over-ranks", MTP, "Extra(tensor, sequence=True)", "Extra(tensor, sequence=False)", (MTP_TESTS, MTP_MESHES)),
    Mutant("mtp-head-not-counted", CONFIG, "self.num_multiplied_params + self.n_mtp_layers * self.vocab_size * self.dim", "self.num_multiplied_params", (MTP_TESTS,)),
    Mutant("mtp-stages-pass-one-state", LAYOUT, "states_per_position=1 + args.n_mtp_layers,", "", (MTP_TESTS,)),
    Mutant("mtp-not-in-the-config", FORMAT, "**({MTP: args.n_mtp_layers} if args.n_mtp_layers else {}),", "", (MTP_TESTS,)),
    Mutant("qwen3-moe-weights-with-the-bias", MOE_MODEL, "weights = scores.gather(1, chosen)", "weights = (scores if self.choice.bias is None else scores + self.choice.bias).gather(1, chosen)", (MOE,)),
    Mutant("qwen3-moe-always-normed", MOE_MODEL, "if self.norm:", "if True:", (MOE,)),
    Mutant("qwen3-moe-never-scaled", MOE_MODEL, "return weights * self.scale, chosen, scores", "return weights, chosen, scores", (MOE,)),
    Mutant("qwen3-moe-routed-in-bf16", MOE_MODEL, "F.linear(tokens.flatten(0, -2).float(), self.weight.float())", "F.linear(tokens.flatten(0, -2), self.weight.to(tokens.dtype)).float()", (MOE,)),
    Mutant("qwen3-moe-softmax-always", MOE_MODEL, "logits.sigmoid() if self.sigmoid else", "logits.softmax(-1) if self.sigmoid else", (MOE,)),
    Mutant("qwen3-moe-gate-and-up-swapped", MOE_MODEL, "F.silu(gate) * up", "F.silu(up) * gate", (MOE,)),
    Mutant("qwen3-moe-shared-ignored", MOE_MODEL, "combine(outputs, weights, places).view_as(x) + shared", "combine(outputs, weights, places).view_as(x)", (MOE,)),
    Mutant("qwen3-moe-shared-not-counted", MOE_CONFIG, "(experts * self.expert_dim + self.shared_dim)", "experts * self.expert_dim", (MOE,)),
    Mutant("qwen3-moe-flops-of-all-experts", MOE_CONFIG, "return self.num_active_params - (0", "return self.num_params - (0", (MOE,)),
    Mutant("qwen3-moe-blocks-cost-the-same", MOE_LAYOUT, "if args.n_dense_layers else base.block_costs,", "if False else base.block_costs,", (MOE,)),
    Mutant("qwen3-moe-experts-start-shallow", MOE_LAYOUT, 'initial_values(all_blocks(args), "feed_forward.*w[23]*")', "initial_values(all_blocks(args))", (MOE,)),
    Mutant("qwen3-moe-normed-by-default", MOE_FORMAT, 'norm_weights=flag(config, "norm_topk_prob")', 'norm_weights=config.get("norm_topk_prob", True)', (MOE_FORMATS,)),
    Mutant("qwen3-moe-every-second-layer", MOE_FORMAT, "if step != 1:", "if False:", (MOE_FORMATS,)),
    Mutant("qwen3-moe-any-dense-layers", MOE_FORMAT, "if dense != list(range(len(dense))):", "if False:", (MOE_FORMATS,)),
    Mutant("qwen3-moe-deepseek-exported", MOE_FORMAT, "if ours[name] != value:", "if False:", (MOE_FORMATS,)),
    Mutant("qwen3-keys-not-normed", BLOCK, "q, k = self.q_norm(q), self.k_norm(k)", "q = self.q_norm(q)", (QWEN3,)),
    Mutant("qwen3-norms-swapped", BLOCK, "q, k = self.q_norm(q), self.k_norm(k)", "q, k = self.k_norm(q), self.q_norm(k)", (QWEN3,)),
    Mutant("qwen3-heads-as-wide-as-the-model", BLOCK, "q_dim, kv_dim = args.n_heads * args.head_dim,", "q_dim, kv_dim = args.dim,", (QWEN3,)),
    Mutant("qwen3-pairs-of-neighbours", MTP_MODEL, "GroupedQueryAttention(args, rotate_halves,", "GroupedQueryAttention(args, lambda x, rope: rotate_halves(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), rope),", (QWEN3,)),
    Mutant("qwen3-halves-swapped", ROTARY, "torch.cat(_rotated(first, second, rope), dim=-1)", "torch.cat(_rotated(second, first, rope), dim=-1)", (QWEN3,)),
    Mutant("qwen3-norms-not-counted", CONFIG, " + 2 * self.head_dim\n", "\n", (QWEN3,)),
    Mutant("qwen3-flops-of-the-width", CONFIG, "self.num_blocks * self.n_heads * self.head_dim * seq_len", "self.num_blocks * self.dim * seq_len", (QWEN3,)),
    Mutant("qwen3-odd-heads-accepted", CONFIG, "if self.head_dim % 2:", "if False:", (QWEN3,)),
    Mutant("qwen3-windows-ignored", FORMAT, 'if flag(config, "use_sliding_window"):', "if False:", (FORMATS,)),
    Mutant("qwen3-windows-of-layers-ignored", FORMAT, "all(kind == _FULL for kind in kinds)", "True", (FORMATS,)),
    Mutant("qwen3-norms-not-written", FORMAT, '    "attention.k_norm": "self_attn.k_norm",\n', "", (FORMATS,)),
    Mutant("qwen3-scaling-ignored", FORMAT, 'rope_parameters(config, {"default": ()})', 'rope_parameters(config, {"default": (), "linear": ("factor",)})', (FORMATS,)),
)  # fmt: skip
