"""The benchmark that compares the trainer with a bare loop in plain torch."""

from __future__ import annotations

from pathlib import Path

from benchmarks.overhead import peaks

SEQUENCES, LENGTH, VOCABULARY = 4, 64, 4096


def test_the_trainer_needs_fewer_bytes_at_its_peak_than_a_bare_loop(tmp_path: Path) -> None:
    """The loss in chunks saves the logits of the batch and their gradient. If losses differ, ``peaks`` raises."""
    settings = {
        "model.args": f"{{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64, vocab_size = {VOCABULARY}}}",
        "training.seq_len": str(LENGTH),
        "training.local_batch_size": str(SEQUENCES),
        "objective.chunk_tokens": "32",
    }
    bare, ours = peaks(settings, str(tmp_path))
    logits = 4 * SEQUENCES * LENGTH * VOCABULARY  # in fp32
    assert bare > 2 * logits
    assert ours < bare - 2 * logits
