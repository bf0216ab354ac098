"""Runs of NVIDIA, dense models: NeMo, Megatron-Bridge, and MaxText on H100.

* dgxc-: llama3.1/README_{8b,70b,405b}.md and maxtext/README_70b.md of NVIDIA/dgxc-benchmarking at 143b90dd: seconds a step.
  MaxText's remat policy, at another version, was save_qkv_proj (maxtext/configure.sh at 0b71cfda): full recomputation here.
* nemo-: docs/source/performance/performance_summary.md of NVIDIA/NeMo at 070a0bb1 (float8).
* bridge-: docs/performance-summary.md of NVIDIA-NeMo/Megatron-Bridge at 00b7660b (container 25.11). FP8-CS is float8 with a
  scale a tensor.
* long-: docs/source/performance/performance_long_sequence.md, of NVIDIA/NeMo at 0aa26711 for Llama 2 7B on H100 (the batches
  are in the version of container 25.04, which also has Llama 3 8B on B200): TFLOP/s. All operations of attention count,
  without regard to the causal mask: so read, 776 TFLOP/s and 16847 tokens/s of Llama 2 7B in the summary agree; on B200, the
  other reading would have 1608 TFLOP/s at 1024K positions, almost all of them bf16 attention's.

At most optimizer state was sharded; here FSDP shards parameters too, within a node where a job has more than one and
accumulates gradients. With TP, its communication was overlapped (ub_tp_comm_overlap), as async TP does here. Recomputation
is not stated for NeMo and Megatron: none.
"""

from __future__ import annotations

from benchmarks.published.row import NVIDIA, Row, Trainer, job

BF16 = job(compile=True, recompute="none")
FLOAT8 = job(BF16, float8=True)
MAXTEXT = Trainer("MaxText")
LLAMA_2 = {"vocab_size": 32000}
LLAMA_2_7B = {**LLAMA_2, "n_kv_heads": 32, "ffn_dim": 11008}
LLAMA_2_13B = {**LLAMA_2_7B, "dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 13824}
EVEN = job(schedule="Interleaved1F1B", first_less=0, last_less=0)
"""Stages with equally many blocks, whatever embedding and head cost."""


def _steps(length: int, sequences: int, seconds: float, ranks: int) -> float:
    """Return the tokens per second and GPU of a run that takes ``seconds`` a step."""
    return length * sequences / seconds / ranks


def _8b(name: str, kind: dict[str, str], ranks: int, seconds: float) -> Row:
    nodes = ranks // 8
    settings = job(kind, cp=2, local=1, total=16 * ranks, replicate=nodes, shard=4)
    return Row(name, "llama3_8b", ranks, settings, _steps(8192, 16 * ranks, seconds, ranks), trainer=NVIDIA)


def _70b(name: str, kind: dict[str, str], ranks: int, seconds: float) -> Row:
    # 80 blocks / 4 ranks / 5 stages
    settings = job(kind, EVEN, tp=4, async_tp=True, cp=2, pp=4, stage_layers=4, local=64, total=2 * ranks)
    return Row(name, "llama3_70b", ranks, settings, _steps(8192, 2 * ranks, seconds, ranks), trainer=NVIDIA)


def _405b(name: str, kind: dict[str, str], ranks: int, seconds: float) -> Row:
    # 126 blocks / 9 ranks / 7 stages
    settings = job(kind, EVEN, tp=8, async_tp=True, cp=2, pp=9, stage_layers=2, local=63, total=252 * ranks // 576)
    tokens = _steps(8192, 252 * ranks // 576, seconds, ranks)
    return Row(name, "llama3_405b", ranks, settings, tokens, trainer=NVIDIA)


def _maxtext(name: str, float8: bool, ranks: int, seconds: float) -> Row:
    settings = job(
        compile=True, float8=float8, recompute="full", length=4096, tp=1, local=2, total=-1, replicate=max(1, ranks // 128)
        if ranks > 256 else 1, model=LLAMA_2,
    )  # fmt: skip
    return Row(name, "llama3_70b", ranks, settings, _steps(4096, 2 * ranks, seconds, ranks), trainer=MAXTEXT)


def _summary(name: str, recipe: str, ranks: int, tokens: float, settings: dict[str, str], machine: str = "h100") -> Row:
    return Row(name, recipe, ranks, settings, tokens, machine=machine, trainer=NVIDIA)


def _long(positions: int, ranks: int, tp: int, cp: int, tflops: float, machine: str) -> Row:
    """Return a row of the long sequences: ``positions`` in units of 1024, and 4M tokens a step."""
    length, on_h100 = 1024 * positions, machine == "h100"
    per_token = (39.64e9 if on_h100 else 45.02e9) + 12 * 32 * 4096 * length
    sizes = LLAMA_2_7B if on_h100 else {}
    dp = ranks // (tp * cp)
    settings = job(
        FLOAT8, length=length, tp=tp, cp=cp, local=1, total=4096 // positions, async_tp=tp > 1,
        model={**sizes, "max_seq_len": length},
    )  # fmt: skip
    assert 4096 // positions % dp == 0
    return Row(
        f"long-{'7b-h100' if on_h100 else '8b-b200'}-{positions}k", "llama3_8b", ranks, settings, tflops * 1e12 / per_token,
        machine=machine, trainer=NVIDIA,
    )  # fmt: skip


ROWS = (
    _8b("dgxc-8b-8", BF16, 8, 12.91),
    _8b("dgxc-8b-128", BF16, 128, 13.10),
    _8b("dgxc-8b-float8-8", FLOAT8, 8, 9.67),
    _8b("dgxc-8b-float8-128", FLOAT8, 128, 9.82),
    _70b("dgxc-70b-64", BF16, 64, 14.72),
    _70b("dgxc-70b-2048", BF16, 2048, 14.98),
    _70b("dgxc-70b-float8-64", FLOAT8, 64, 11.01),
    _70b("dgxc-70b-float8-2048", FLOAT8, 2048, 11.39),
    _405b("dgxc-405b-576", BF16, 576, 17.20),
    _405b("dgxc-405b-2304", BF16, 2304, 17.62),
    _405b("dgxc-405b-float8-576", FLOAT8, 576, 11.24),
    _405b("dgxc-405b-float8-2304", FLOAT8, 2304, 12.35),
    _maxtext("dgxc-maxtext-64", False, 64, 6.999),
    _maxtext("dgxc-maxtext-256", False, 256, 7.153),
    _maxtext("dgxc-maxtext-2048", False, 2048, 7.066),
    _maxtext("dgxc-maxtext-float8-64", True, 64, 4.324),
    _maxtext("dgxc-maxtext-float8-256", True, 256, 4.959),
    _maxtext("dgxc-maxtext-float8-2048", True, 2048, 4.93),
    _summary("nemo-llama2-7b", "llama3_8b", 8, 16847, job(FLOAT8, length=4096, local=1, total=128, model=LLAMA_2_7B)),
    _summary(
        "nemo-llama2-13b", "llama3_8b", 16, 8646,
        job(FLOAT8, EVEN, length=4096, pp=4, stage_layers=1, local=32, total=128, model=LLAMA_2_13B),
    ),
    _summary(
        "nemo-llama2-70b", "llama3_70b", 64, 1707,
        job(FLOAT8, EVEN, length=4096, tp=4, async_tp=True, pp=4, stage_layers=1, local=32, total=128, model=LLAMA_2),
    ),
    _summary("nemo-8b", "llama3_8b", 8, 12036, job(FLOAT8, cp=2, local=1, total=128)),
    _summary(
        "nemo-70b", "llama3_70b", 64, 1533,
        job(FLOAT8, EVEN, tp=4, async_tp=True, cp=2, pp=4, stage_layers=4, local=64, total=128),
    ),
    _summary("bridge-8b", "llama3_8b", 8, 14451, job(FLOAT8, local=1, total=128)),
    _summary(
        "bridge-70b", "llama3_70b", 64, 1602,
        job(FLOAT8, EVEN, tp=4, async_tp=True, pp=8, stage_layers=2, local=64, total=128),
    ),
    _summary(
        "bridge-405b", "llama3_405b", 1024, 292,
        job(FLOAT8, EVEN, tp=8, async_tp=True, cp=2, pp=8, stage_layers=2, first_less=1, last_less=1, local=64, total=512),
    ),
    _summary("bridge-8b-b200", "llama3_8b", 8, 30624, job(FLOAT8, local=2, total=128), "b200"),
    _summary(
        "bridge-405b-b200", "llama3_405b", 128, 661,
        job(FLOAT8, EVEN, tp=4, async_tp=True, cp=2, pp=8, stage_layers=2, first_less=1, last_less=1, local=32, total=64),
        "b200",
    ),
    _long(4, 4, 1, 1, 768, "h100"),
    _long(16, 16, 2, 1, 660, "h100"),
    _long(32, 32, 2, 2, 610, "h100"),
    _long(64, 64, 4, 2, 574, "h100"),
    _long(128, 128, 4, 4, 555, "h100"),
    _long(256, 256, 4, 8, 549, "h100"),
    _long(512, 512, 8, 16, 549, "h100"),
    _long(1024, 1024, 8, 32, 536, "h100"),
    _long(8, 2, 1, 1, 1671, "b200"),
    _long(16, 4, 1, 1, 1717, "b200"),
    _long(32, 8, 1, 2, 1624, "b200"),
    _long(64, 16, 1, 4, 1600, "b200"),
    _long(128, 32, 2, 4, 1588, "b200"),
    _long(256, 64, 4, 4, 1590, "b200"),
    _long(512, 128, 4, 8, 1619, "b200"),
    _long(1024, 256, 4, 16, 1608, "b200"),
)  # fmt: skip
