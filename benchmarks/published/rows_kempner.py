"""Runs of KempnerForge on H200 nodes of four: FSDP2, TP with SP, compiled, full recomputation, sequences of 4096 tokens.

* kf-: benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md and mfu_bench.sh of KempnerInstitute/KempnerForge at 9f3f03a0.
* kf-weak-: benchmarks/weak_scaling_160gpu/README.md at e9f91892.
* kf-175b-360: benchmarks/175b_360gpu/README.md at b62d2e36.

Throughputs are those of all GPUs, divided by their number. Parameters and optimizer state were in bf16
(kempnerforge/distributed/parallel.py at 01b461a7), so their memory is not compared. Logits were gathered for the loss
(tensor_parallel.py at 0c4eba1e).
"""

from __future__ import annotations

from benchmarks.published.row import Row, Trainer, job

KEMPNER = Trainer("KempnerForge", full_logits=True)
COMMON = job(length=4096, recompute="full", compile=True, loss_parallel_off=True)
SIZES: dict[str, tuple[str, dict[str, object]]] = {
    "7b": ("llama3_8b", {}),
    "13b": ("llama3_8b", {"dim": 5120, "n_layers": 40, "n_heads": 40, "ffn_dim": 17920}),
    "70b": ("llama3_70b", {}),
    "175b": ("llama3_70b", {"dim": 12288, "n_layers": 96, "n_heads": 96, "ffn_dim": 39680}),
}


def _row(kind: str, size: str, ranks: int, tp: int, local: int, accumulated: int, tokens: int, **settings: object) -> Row:
    """Return a row. ``local`` sequences at once, ``accumulated`` times a step; ``tokens`` per second of all GPUs."""
    recipe, model = SIZES[size]
    batch = job(tp=tp, local=local, total=local * accumulated * ranks // tp)
    options = job(COMMON, batch, model=model, **settings)
    name = f"{kind}-{size}-{ranks}"
    return Row(name, recipe, ranks, options, tokens / ranks, machine="kempner-h200", trainer=KEMPNER)


ROWS = (
    _row("kf", "7b", 1, 1, 2, 4, 10_471),
    _row("kf", "7b", 2, 1, 2, 4, 18_728),
    _row("kf-tp2", "7b", 2, 2, 4, 2, 13_163),
    _row("kf", "7b", 4, 1, 4, 2, 38_983),
    _row("kf-tp4", "7b", 4, 4, 4, 2, 25_135),
    _row("kf-tp2", "7b", 4, 2, 4, 2, 25_980),
    _row("kf-tp4", "7b", 8, 4, 4, 2, 44_299),
    _row("kf-eager", "13b", 8, 1, 4, 4, 35_405, compile=False),
    _row("kf-tp4", "13b", 8, 4, 4, 4, 27_345),
    _row("kf-tp4", "7b", 16, 4, 4, 2, 82_988),
    _row("kf-tp4", "13b", 16, 4, 4, 4, 53_814),
    _row("kf-tp4", "7b", 32, 4, 4, 2, 155_917),
    _row("kf-tp4", "13b", 32, 4, 4, 4, 104_309),
    _row("kf-tp4", "70b", 32, 4, 2, 4, 17_657),
    _row("kf-weak", "13b", 8, 4, 4, 4, 29_860),
    _row("kf-weak", "13b", 32, 4, 4, 4, 110_373),
    _row("kf-weak", "13b", 64, 4, 4, 4, 216_507),
    _row("kf-weak", "13b", 128, 4, 4, 4, 423_306),
    _row("kf-weak", "13b", 160, 4, 4, 4, 534_644),
    _row("kf-weak", "70b", 8, 4, 2, 4, 3_623),
    _row("kf-weak", "70b", 32, 4, 2, 4, 18_688),
    _row("kf-weak", "70b", 64, 4, 2, 4, 35_824),
    _row("kf-weak", "70b", 96, 4, 2, 4, 52_190),
    _row("kf-weak", "70b", 128, 4, 2, 4, 69_985),
    _row("kf-weak", "70b", 160, 4, 2, 4, 85_571),
    _row("kf", "175b", 360, 4, 8, 1, 154_523),
)
