"""Runs of TorchTitan.

* 8b, 70b, 405b: arXiv 2410.06511, tables 1 to 6 (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md): H100
  with 96 GB at 500 W. Their memory is what torch's allocator had reserved at most (``max_reserved_gib`` of TorchTitan's
  metrics) on the rank that needed most, with expandable segments.
* a100: docs/performance.md of pytorch/torchtitan at 04133643: 64 A100 with 80 GB, sequences of 8192 tokens (Llama 3) and
  4096 (Llama 2); not compiled (train_configs/llama3_8b.toml at 0011fb90).
* h200: benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md at 1af29373, by Trainy.
"""

from __future__ import annotations

from benchmarks.published.row import Row, job

ON_96_GB = "h100-96gb"
COMPILE, EAGER = job(compile=True), job(compile=False)
FLOAT8 = job(compile=True, float8=True)
ASYNC = job(FLOAT8, async_tp=True)
# That version of TorchTitan divided a batch into as many microbatches as the pipeline has ranks.
PIPELINE = job(ASYNC, micro=4)
BATCH_70B = job(local=16, total=512)


def _long(length: int, cp: int) -> dict[str, str]:
    return job(FLOAT8, length=length, local=1, cp=cp, recompute="full", model={"max_seq_len": max(131072, length)})


def _long_405b(length: int, cp: int) -> dict[str, str]:
    return job(_long(length, cp), ASYNC, local=8, schedule="1F1B")


LLAMA_2 = {"vocab_size": 32000}
"""Sizes of Llama 2, where they differ from Llama 3: rows_ibm.py, and torchtitan/models/llama/__init__.py."""
LLAMA_2_13B = {
    **LLAMA_2, "dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 13824,
}  # fmt: skip
ON_A100 = job(compile=False, local=1)
OF_LLAMA_2 = job(compile=False, length=4096, local=2)

ROWS = (
    Row("8b-8-eager", "llama3_8b", 8, EAGER, 5762, 82.4, ON_96_GB),
    Row("8b-8-compile", "llama3_8b", 8, COMPILE, 6667, 77.0, ON_96_GB),
    Row("8b-8-float8", "llama3_8b", 8, FLOAT8, 8532, 76.8, ON_96_GB),
    Row("8b-cp1", "llama3_8b", 8, _long(32768, 1), 3890, 83.9, ON_96_GB),
    Row("8b-cp2", "llama3_8b", 8, _long(65536, 2), 2540, 84.2, ON_96_GB),
    Row("8b-cp4", "llama3_8b", 8, _long(131072, 4), 1071, 84.0, ON_96_GB),
    Row("8b-cp8", "llama3_8b", 8, _long(262144, 8), 548, 84.5, ON_96_GB),
    Row("8b-128-eager", "llama3_8b", 128, EAGER, 5605, 67.0, ON_96_GB),
    Row("8b-128-compile", "llama3_8b", 128, COMPILE, 6514, 62.0, ON_96_GB),
    Row("8b-128-float8", "llama3_8b", 128, FLOAT8, 8380, 61.8, ON_96_GB),
    Row("70b-float8", "llama3_70b", 256, job(FLOAT8, BATCH_70B), 829, 71.9, ON_96_GB),
    Row("70b-async", "llama3_70b", 256, job(ASYNC, BATCH_70B), 876, 67.6, ON_96_GB),
    Row("405b-1f1b", "llama3_405b", 512, job(PIPELINE, schedule="1F1B"), 100, 82.5, ON_96_GB),
    Row("405b-interleaved", "llama3_405b", 512, job(PIPELINE, schedule="Interleaved1F1B"), 128, 72.7, ON_96_GB),
    Row("405b-cp1", "llama3_405b", 512, _long_405b(32768, 1), 76, 75.3, ON_96_GB),
    Row("405b-cp2", "llama3_405b", 512, _long_405b(65536, 2), 47, 75.9, ON_96_GB),
    Row("405b-cp4", "llama3_405b", 512, _long_405b(131072, 4), 31, 77.1, ON_96_GB),
    Row("405b-cp8", "llama3_405b", 512, _long_405b(262144, 8), 16, 84.9, ON_96_GB),
    Row(
        "a100-8b-layer", "llama3_8b", 64, job(ON_A100, recompute="selective", recompute_option=2), 2904, machine="a100"
    ),
    Row("a100-8b-op", "llama3_8b", 64, job(ON_A100, recompute="selective"), 2973, machine="a100"),
    Row("a100-70b", "llama3_70b", 64, job(ON_A100, total=64, tp=1, recompute="full"), 331, machine="a100"),
    Row(
        "a100-llama2-13b", "llama3_8b", 64, job(OF_LLAMA_2, recompute="none", model=LLAMA_2_13B), 2162, machine="a100"
    ),
    Row(
        "a100-llama2-13b-layer", "llama3_8b", 64,
        job(OF_LLAMA_2, recompute="selective", recompute_option=2, model=LLAMA_2_13B), 1914, machine="a100",
    ),
    Row(
        "a100-llama2-13b-op", "llama3_8b", 64, job(OF_LLAMA_2, recompute="selective", model=LLAMA_2_13B), 1904,
        machine="a100",
    ),
    Row(
        "a100-llama2-70b-op", "llama3_70b", 64,
        job(OF_LLAMA_2, local=1, total=64, tp=1, recompute="selective", model=LLAMA_2), 355, machine="a100",
    ),
    Row(
        "a100-llama2-70b", "llama3_70b", 64,
        job(OF_LLAMA_2, total=128, tp=1, recompute="full", model=LLAMA_2), 353, machine="a100",
    ),
    Row("h200-8b-32", "llama3_8b", 32, job(FLOAT8, float8_gather=True, local=2), 10938, 47.96, "h200"),
    Row("h200-8b-64", "llama3_8b", 64, job(FLOAT8, float8_gather=True, local=2), 10753, 46.97, "h200"),
)  # fmt: skip
