"""Runs of IBM with FSDP 1: Llama 2, sequences of 4096 tokens, FlashAttention 2, not compiled.

* README.md of foundation-model-stack/fms-fsdp at 0d319983: 128 A100. Sizes: fms_fsdp/utils/config_utils.py at 08d8ae7f.
* -blog, -h100: "Maximizing training throughput using PyTorch FSDP", table 1 (pytorch/pytorch.github.io,
  _posts/2024-03-13-maximizing-training.md at 2ad10059): 128 A100 with 400 Gb/s between nodes, 96 H100 with 800 Gb/s.

7B and 13B are sharded within a node, larger models over all (docs/configurations.md of the repository at cc4b276b).
"""

from __future__ import annotations

from benchmarks.published.row import Row, Trainer, job

IBM = Trainer("IBM", full_logits=True, flash=True)
RANKS = {"ibm-a100": 128, "ibm-h100": 96}
LLAMA_2 = {"vocab_size": 32000}
SIZES: dict[str, tuple[str, dict[str, object]]] = {
    "7b": ("llama3_8b", {**LLAMA_2, "n_kv_heads": 32, "ffn_dim": 11008}),
    "13b": ("llama3_8b", {**LLAMA_2, "dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 13824}),
    "34b": ("llama3_70b", {**LLAMA_2, "n_layers": 48, "ffn_dim": 22016}),
    "70b": ("llama3_70b", LLAMA_2),
}  # fmt: skip


def _row(size: str, tokens: float, machine: str, local: int, suffix: str = "") -> Row:
    recipe, model = SIZES[size]
    ranks = RANKS[machine]
    if recipe == "llama3_8b":
        settings = job(shard=8, replicate=ranks // 8, recompute="none")
    else:
        settings = job(tp=1, total=-1, recompute="full")
    options = job(settings, compile=False, length=4096, local=local, model=model)
    return Row(f"ibm-{size}{suffix}", recipe, ranks, options, tokens, machine=machine, trainer=IBM)


ROWS = (
    _row("7b", 3760, "ibm-a100", 2),
    _row("13b", 1700, "ibm-a100", 1),
    _row("34b", 772, "ibm-a100", 8),
    _row("70b", 380, "ibm-a100", 6),
    _row("7b", 3700, "ibm-a100", 2, "-blog"),
    _row("34b", 700, "ibm-a100", 2, "-blog"),
    _row("70b", 370, "ibm-a100", 2, "-blog"),
    _row("7b", 7500, "ibm-h100", 2, "-h100"),
    _row("34b", 1550, "ibm-h100", 2, "-h100"),
    _row("70b", 800, "ibm-h100", 2, "-h100"),
)
