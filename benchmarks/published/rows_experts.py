"""Runs of models with experts, which forced an even choice.

* qwen3-30b-: torchtitan/distributed/deepep/README.md and qwen3_30b_a3b_with_deepep.toml of pytorch/torchtitan at 022f885f:
  with its own all-to-all and with DeepEP.
* nemo-: docs/performance-summary.md and qwen3_moe_30b_te_deepep.yaml of NVIDIA-NeMo/Automodel at 01926a5c; its
  {gptoss_20b,gptoss_120b,deepseek_v3}_te_deepep.yaml at 037e04a6: DeepEP, kernels of Transformer Engine.
* megatron-235b-: best_practice/Qwen3/readme.md of yanring/Megatron-MoE-ModelZoo at c1ad0b5c: DeepEP. Pipelines recompute
  norms and activation functions, which is less than Titan's selective mode; for long sequences all of the experts. There,
  TFLOP/s are published, with half of the operations of attention: so read, 276 TFLOP/s and 17.6 s of the first table agree.
* folding-: arXiv 2504.14960, table 3: Megatron-Core, tokens beyond an even share dropped. MFU of 989.5 TFLOP/s in bf16; all
  operations of attention count here (half of them is 2 to 4 % more tokens). No interleaving is stated.
* bridge-: docs/performance-summary.md of NVIDIA-NeMo/Megatron-Bridge, container 26.02.01 (the page's later version).
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.published.row import NVIDIA, TORCHTITAN, Row, job

FLOAT8_EXPERTS = job(float8=True) | {"float8.recipe_name": "rowwise_with_gw_hp", "float8.convert_experts": "true"}
OF_30B = job(ep=8, compile=True, length=4096, recompute="full")
OF_235B = job(compile=True, length=4096, total=2048, tp=2)
PIPELINED = job(
    OF_235B, micro=1, schedule="Interleaved1F1B", recompute="selective", stage_layers=3, first_less=1, last_less=1
)  # fmt: skip
"""94 blocks, embedding and head on 8 ranks with 4 stages each."""


def _30b(name: str, ranks: int, tokens: float, gib: float | None) -> Row:
    return Row(name, "qwen3_30b_a3b", ranks, job(OF_30B, local=8), tokens, gib, "b200", TORCHTITAN)


def _235b(name: str, tokens: float, settings: dict[str, str]) -> Row:
    return Row(name, "qwen3_235b_a22b", 256, settings, tokens, trainer=NVIDIA)


def _of_step(seconds: float) -> float:
    """Return the tokens per second and GPU of Megatron's runs from the duration of a step."""
    return 2048 * 4096 / seconds / 256


def _long_235b(positions: int, cp: int, tflops: float) -> Row:
    length = 1024 * positions
    per_token = 6 * 21.56e9 + 6 * 94 * 8192 * length
    settings = job(
        PIPELINED, length=length, tp=4, cp=cp, ep=8, pp=8, local=32 * cp, total=256, model={"max_seq_len": length}
    )  # fmt: skip
    return _235b(f"megatron-235b-{positions}k", tflops * 1e12 / per_token, settings)


GPT_OSS = job(length=4096, local=2, recompute="none")
DEEPSEEK = job(length=4096, ep=64, pp=4, schedule="Interleaved1F1B", micro=1, stage_layers=2, recompute="full")


def _of_library(
    name: str, architecture: str, config: Mapping[str, int | bool], ranks: int, tokens: float, settings: Mapping[str, str]
) -> Row:
    """Return a row of a model of transformers; ``config`` has what differs from the library's defaults."""
    keys = ", ".join(f"{key} = {str(value).lower()}" for key, value in config.items())
    model = {"model.flavor": "", "model.args": f'{{architecture = "{architecture}", config = {{{keys}}}}}'}
    return Row(name, "gpt_oss_20b", ranks, {**settings, **model}, tokens, trainer=NVIDIA)


QWEN2 = {
    "vocab_size": 151936, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480,
}  # fmt: skip
OF_QWEN2 = 6 * (28 * (2 * 3584 * 128 * (28 + 4) + 3 * 3584 * (8 * 2560 + 20480)) + 151936 * 3584) + 12 * 28 * 3584 * 4096
"""Operations of a token, all those of attention included."""


def _folded(name: str, mfu: float, **settings: object) -> Row:
    options = job(compile=True, length=4096, total=256, recompute="none", **settings)
    return _of_library(name, "qwen2_moe", QWEN2, 64, mfu * 989.5e12 / OF_QWEN2, options)


ROWS = (
    _30b("qwen3-30b-alltoall", 8, 9930, None),
    _30b("qwen3-30b-deepep", 8, 14796, 167.93),
    _30b("qwen3-30b-deepep-16", 16, 14380, 138.75),
    _30b("qwen3-30b-deepep-32", 32, 14276, 124.58),
    _30b("qwen3-30b-deepep-64", 64, 14107, 117.50),
    _30b("qwen3-30b-deepep-128", 128, 13856, 114.78),
    Row("nemo-30b", "qwen3_30b_a3b", 8, job(OF_30B, local=4, total=512), 12040, trainer=NVIDIA),
    Row("nemo-gpt-oss-20b", "gpt_oss_20b", 8, job(GPT_OSS, ep=8, total=256), 13058, trainer=NVIDIA),
    _of_library("nemo-gpt-oss-120b", "gpt_oss", {}, 64, 7626, job(GPT_OSS, ep=64, total=512)),
    _of_library("nemo-deepseek-256", "deepseek_v3", {}, 256, 1002, job(DEEPSEEK, local=8, total=512)),
    _235b("megatron-235b-fsdp", _of_step(17.6), job(OF_235B, ep=8, local=4)),
    _235b("megatron-235b-pp8", _of_step(19.7), job(PIPELINED, ep=32, pp=8, local=128)),
    _235b("megatron-235b-tp4", _of_step(29.0), job(PIPELINED, tp=4, ep=8, pp=8, local=256, recompute="none")),
    _long_235b(16, 1, 295),
    _long_235b(32, 2, 335),
    _long_235b(64, 4, 368),
    _long_235b(128, 8, 389),
    _folded("folding-qwen2-fsdp", 0.254, ep=8, local=1),
    _folded("folding-qwen2", 0.39, tp=2, ep=4, pp=4, schedule="1F1B", micro=1, local=32),
    _235b(
        "bridge-235b-float8", 1611,
        job(PIPELINED, FLOAT8_EXPERTS, ep=32, pp=8, local=512, total=8192),
    ),
)  # fmt: skip
