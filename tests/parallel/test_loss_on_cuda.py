"""Memory and work of the loss, on fake CUDA tensors."""

from __future__ import annotations

from harness.fake_cuda import FakeCuda

LOSS = "logits and loss"  # titan-simulate's name of this owner
VOCAB, DIM, TOKENS, CHUNK = 65_536, 64, 2 * 512, 128
MODEL: dict[str, object] = {
    "model.args": f"{{dim = {DIM}, n_layers = 1, n_heads = 2, n_kv_heads = 2, ffn_dim = 64, vocab_size = {VOCAB}}}",
    "training.seq_len": 512, "training.local_batch_size": 2, "training.global_batch_size": 16,
    "training.mixed_precision_param": "bfloat16",
}  # fmt: skip


def test_the_loss_holds_the_logits_of_a_chunk_and_nothing_is_computed_twice(fake_cuda: FakeCuda) -> None:
    whole, chunked = (
        fake_cuda.train("tiny", {**MODEL, "objective.chunk_tokens": tokens}, world_size=8, strict=False).steps[-1]
        for tokens in (TOKENS, CHUNK)
    )
    bf16, fp32 = 2 * CHUNK * VOCAB, 4 * CHUNK * VOCAB
    weight = (2 + 4) * VOCAB * DIM  # the gradient of a chunk in bf16, and the sum in fp32
    held = max(phase.peak.owners.get(LOSS, 0) for phase in chunked.phases)
    assert held < bf16 + bf16 + fp32 + weight + 2**20
    assert held < 0.5 * max(phase.peak.owners.get(LOSS, 0) for phase in whole.phases)
    assert sum(phase.flops for phase in chunked.phases) == sum(phase.flops for phase in whole.phases)
    assert max(one.bytes // one.count for phase in chunked.phases for one in phase.peak.allocations) < TOKENS * VOCAB * 2
