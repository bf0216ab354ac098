"""Mistakes in the Llama models, in the library of their blocks, and in their formats."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

LLAMA, FORMATS, ROPE, TOKENIZER = (
    "tests/models_llama/test_llama.py",
    "tests/models_llama/test_formats.py",
    "tests/models_llama/test_rope.py",
    "tests/models_llama/test_tokenizer.py",
)
SUITES = "tests/integration/test_inherited_suites.py"
CONFIG, WHOLE = "models-llama/config.py", "models-llama/model.py"
LAYOUT, BLOCK, TABLE, HF, HF_CONFIG = (
    f"nn/{name}.py" for name in ("decoder_layout", "decoder", "rotary", "hf_decoder", "hf_config")
)

MUTANTS = (
    Mutant("gate-and-up-swapped", BLOCK, "F.silu(self.w1(x)) * self.w3(x)", "F.silu(self.w3(x)) * self.w1(x)", (LLAMA, FORMATS)),
    Mutant("norm-of-the-wrong-input", BLOCK, "return h + self.feed_forward(self.ffn_norm(h))", "return h + self.feed_forward(self.ffn_norm(x))", (LLAMA, FORMATS)),
    Mutant("values-rotated", BLOCK, "q, k = self.rotate(q, rope), self.rotate(k, rope)", "q, k, v = self.rotate(q, rope), self.rotate(k, rope), self.rotate(v, rope)", (LLAMA, FORMATS)),
    Mutant("documents-not-masked", BLOCK, "in (q, k, v)), documents)", "in (q, k, v)))", (SUITES + "::TestLlama::test_check",)),
    Mutant("positions-ignored", WHOLE, "self.rope[: h.shape[1]] if positions is None else self.rope[positions]", "self.rope[: h.shape[1]]", (LLAMA,)),
    Mutant("norm-with-the-default-eps", WHOLE, "self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)", "self.norm = nn.RMSNorm(args.dim)", (LLAMA, FORMATS)),
    Mutant("wavelengths-of-a-radian", WHOLE, "wavelengths = 2 * math.pi / frequencies", "wavelengths = 1 / frequencies", (ROPE,)),
    Mutant("blend-upside-down", WHOLE, "(1.0 - kept) * frequencies / scaling.factor + kept * frequencies", "kept * frequencies / scaling.factor + (1.0 - kept) * frequencies", (ROPE,)),
    Mutant("rotation-backwards", TABLE, "x * cos - y * sin, x * sin + y * cos", "x * cos + y * sin, y * cos - x * sin", (ROPE, LLAMA)),
    Mutant("rope-in-low-precision", TABLE, "x.float().unflatten", "x.unflatten", (ROPE,),
           equivalent="the table is in fp32, and a product with it is too"),
    Mutant("flops-of-the-lookup", CONFIG, "looked_up = 0 if self.tie_embeddings else self.vocab_size * self.dim", "looked_up = 0", (LLAMA,)),
    Mutant("flops-of-half-the-attention", CONFIG, "12.0 * self.n_layers", "6.0 * self.n_layers", (LLAMA,)),
    Mutant("tied-embeddings-count-twice", CONFIG, "(1 if self.tie_embeddings else 2) * self.vocab_size", "2 * self.vocab_size", (LLAMA,)),
    Mutant("odd-heads-accepted", CONFIG, "if self.dim % (2 * self.n_heads):", "if self.dim % self.n_heads:", (LLAMA,)),
    Mutant("deep-layers-start-large", LAYOUT, "0.02 / (2 * (index + 1)) ** 0.5", "0.02 / (2 * 1) ** 0.5", (LLAMA,)),
    Mutant("gate-starts-smaller", LAYOUT, "feed_forward.w[23].weight", "feed_forward.w[12].weight", (LLAMA,)),
    Mutant("tied-output-starts-like-an-embedding", LAYOUT, "output if args.tie_embeddings else Normal(std=1.0)", "Normal(std=1.0)", (LLAMA,)),
    Mutant("keys-not-permuted", "models-llama/formats.py", '{"attention.wq": order, "attention.wk": order}', '{"attention.wq": order}', (FORMATS,)),
    Mutant("gate-is-up", HF, '"feed_forward.w1": "mlp.gate_proj"', '"feed_forward.w1": "mlp.up_proj"', (FORMATS,)),
    Mutant("biases-ignored", HF_CONFIG, "if flag(config, key):", "if False:", (FORMATS,)),
    Mutant("unknown-keys-ignored", HF_CONFIG, 'if key not in known and key not in _IDS and key != "architectures" and value not in _NOTHING:', "if False:", (FORMATS,)),
    Mutant("key-heads-by-default-one", HF, 'heads if config["num_key_value_heads"] is None', '1 if config["num_key_value_heads"] is None', (FORMATS,)),
    Mutant("theta-of-the-outer-table", HF_CONFIG, '{"rope_theta": config.get("rope_theta", 10_000.0), **table(config, name)}', '{**table(config, name), "rope_theta": config.get("rope_theta", 10_000.0)}', (FORMATS,)),
    Mutant("documents-without-an-end", "models-llama/tokenizer.py", "numpy.concatenate([marks[:1], *pieces, marks[1:]])", "numpy.concatenate([marks[:1], *pieces])", (TOKENIZER,)),
)  # fmt: skip
