"""The loss is computed in the model's last module, one chunk of positions at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from harness import small_gpt
from harness.objectives import first_step
from harness.small_gpt import DIM, LAYOUT, VOCAB, SmallGPT
from harness.storages import LargestLive
from titan_core.api.batch import IGNORE, Batch, Extra
from titan_core.api.dropout import Dropout
from titan_core.api.model_part import ModelPart
from titan_core.api.objective import ObjectiveFunction
from titan_core.api.vocabulary import Vocabulary
from titan_core.model.build import build_parts
from titan_core.model.loss_head import attach
from titan_core.model.next_token import NextToken
from titan_core.model.streams import begin_streams
from titan_core.train.world import join_world


def batch() -> Batch:
    """Three sequences. Some positions have no target, and some targets have a larger weight."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (3, 16), generator=generator)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = targets[1, 4:9] = IGNORE
    return Batch(tokens, targets, weights=torch.rand(3, 16, generator=generator) + 0.5)


def losses_and_gradients(chunk_tokens: int, objective: ObjectiveFunction | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    part = ModelPart(SmallGPT(), LAYOUT, objective or NextToken())
    attach(part, chunk_tokens)
    loss = part.forward_loss(first_step(batch()))
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in part.module.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("chunk_tokens", [1, 6, 20, 47])
def test_chunks_have_the_loss_and_the_gradients_of_the_whole(chunk_tokens: int) -> None:
    loss, gradients = losses_and_gradients(chunk_tokens)
    expected, exact = losses_and_gradients(48)
    torch.testing.assert_close(loss, expected)
    assert gradients.keys() == exact.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, exact[name], rtol=1e-5, atol=1e-6)


class DroppingHead(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, VOCAB, bias=False)
        self.dropout = Dropout(0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.dropout(hidden))


def test_dropout_in_the_last_module_is_the_same_in_chunks() -> None:
    found = []
    for chunk_tokens in (48, 6):
        torch.manual_seed(0)
        model = SmallGPT()
        model.output = DroppingHead()
        begin_streams(model, torch.device("cpu"))
        part = ModelPart(model, LAYOUT, NextToken())
        attach(part, chunk_tokens)
        loss = part.forward_loss(first_step(replace(batch(), rows=torch.arange(3))))
        loss.backward()
        found.append((loss.detach(), model.output.weight.grad, model.norm.weight.grad))
    torch.testing.assert_close(*found)


def test_weights_are_those_of_plain_torch() -> None:
    torch.manual_seed(0)
    model, given = SmallGPT(), batch()
    logits = model(given.tokens)
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), given.targets.flatten(), reduction="none")
    assert given.weights is not None
    assert losses_and_gradients(0)[0].item() == pytest.approx((losses * given.weights.flatten()).sum().item(), rel=1e-6)


class Seen(ObjectiveFunction):
    """Records its arguments."""

    def __init__(self, per_position: bool = True) -> None:
        self.per_position = per_position
        self.batches: list[Batch] = []

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        self.batches.append(batch)
        return logits.sum()


def test_an_objective_of_whole_sequences_receives_all_positions() -> None:
    seen = Seen(per_position=False)
    losses_and_gradients(6, seen)
    assert [batch.tokens.shape for batch in seen.batches] == [(3, 16)]


def test_extra_tensors_are_divided_by_declaration() -> None:
    part, seen = ModelPart(SmallGPT(), LAYOUT, Seen()), torch.arange(48).view(3, 16)
    attach(part, 12)
    assert isinstance(part.objective, Seen)
    extras = {"scores": Extra(seen, sequence=True), "names": Extra(torch.arange(3), sequence=False)}
    with torch.no_grad():
        part.forward_loss(first_step(replace(batch(), extras=extras)))
    chunks = part.objective.batches
    assert torch.equal(torch.cat([chunk.extras["scores"].tensor for chunk in chunks], dim=1), seen)
    assert [chunk.extras["names"].tensor.tolist() for chunk in chunks] == [[0, 1, 2]] * 4


def test_logits_are_returned_if_no_loss_is_computed() -> None:
    part = ModelPart(SmallGPT(), LAYOUT, NextToken())
    expected = part.module(batch().tokens)
    attach(part, 6)
    torch.testing.assert_close(part.module(batch().tokens), expected)


class Capped(SmallGPT):
    """A model whose forward changes the output of its last module."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return 3.0 * torch.tanh(super().forward(tokens, positions, documents) / 3.0)


@pytest.mark.parametrize(("model", "in_head"), [(SmallGPT, True), (Capped, False)])
def test_a_model_that_changes_its_logits_keeps_them(model: type[SmallGPT], in_head: bool) -> None:
    job = small_gpt.job_of(small_gpt.definition(model), {"objective.chunk_tokens": 6})
    with join_world(job) as world:
        (part,) = build_parts(job, world.mesh, world.device)
    assert part.loss_in_head is in_head
    expected = NextToken()(part.module(batch().tokens), batch(), Vocabulary())
    assert part.forward_loss(first_step(batch())).item() == pytest.approx(expected.item(), rel=1e-6)


class Head(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.output = nn.Linear(8, vocab_size, bias=False, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(tokens[..., None].expand(*tokens.shape, 8).bfloat16())


def test_beside_the_logits_of_a_chunk_there_is_one_chunk_in_fp32() -> None:
    """Forward and backward, with a vocabulary that outweighs everything else."""
    vocab_size, chunk = 16384, 16
    layout = replace(LAYOUT, vocab_size=vocab_size, embedding=(), blocks="blocks", head=("output",))
    part = ModelPart(Head(vocab_size), layout, NextToken())
    attach(part, chunk)
    tokens = torch.randint(0, vocab_size, (1, 128))
    for parameter in part.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LargestLive() as live:
        part.forward_loss(first_step(Batch(tokens, tokens))).backward()
    logits, fp32 = 2 * chunk * vocab_size, 4 * chunk * vocab_size
    weight = 2 * 8 * vocab_size  # the gradient of the layer's weight, for this chunk and for the earlier chunks
    # The logits, their scores in fp32, and the bf16 gradient made from the scores.
    assert live.largest < logits + fp32 + logits + 3 * weight
    assert live.largest < 4 * 128 * vocab_size / 2
