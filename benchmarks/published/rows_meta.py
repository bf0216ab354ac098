"""Pre-training of Llama 3 405B by Meta: arXiv 2407.21783, table 4, for sequences of 8192 tokens.

TFLOP/s are divided by the operations of a token as in the paper that the report's MFU cites (PaLM, arXiv 2204.02311,
appendix B): 6 a parameter of a matmul, and 12 x layers x width x positions. FSDP did not free parameters after forward, and
nothing was recomputed (section 3.3.2). The first and the last stage are one block short; how many stages a rank had is not
said: two, as in Titan's recipe.
"""

from __future__ import annotations

from benchmarks.published.row import Row, Trainer, job

META = Trainer("Meta")
TOKEN = 6 * 403.75e9 + 12 * 126 * 16384 * 8192
PIPELINE = job(
    compile=True, recompute="none", tp=8, pp=16, schedule="Interleaved1F1B", stage_layers=4, first_less=1, last_less=1
)  # fmt: skip

ROWS = (
    Row("llama3-405b-8k", "llama3_405b", 8192, job(PIPELINE, local=32), 430e12 / TOKEN, trainer=META),
    Row("llama3-405b-16k", "llama3_405b", 16384, job(PIPELINE, local=16), 400e12 / TOKEN, trainer=META),
)
