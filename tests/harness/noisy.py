"""The model ``noisy``: dropout and state, so that a run that loses any of it changes its losses."""

from __future__ import annotations

from titan_testing.tiny_args import TinyArgs

NOISY_ARGS = TinyArgs(
    dim=32, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=64, max_seq_len=64, dropout=0.2, stateful=True
)  # fmt: skip
NOISY: dict[str, object] = {
    "model.name": "noisy",
    "model.flavor": "tiny",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "training.deterministic": "true",
    "lr_scheduler.warmup_steps": 2,
    "job.device": "cpu",
}
"""Settings of ``tiny`` that train a model with dropout and state in a second."""
