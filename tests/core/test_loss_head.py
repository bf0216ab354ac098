"""The loss is computed in the model's last module, one chunk of positions at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from harness import small_gpt
from harness.objectives import first_step
from harness.small_gpt import DIM, LAYOUT, VOCAB, SmallGPT
from harness.storages import LargestLive
from titan_core.api import Batch, Dropout, Extra, ModelPart, ObjectiveFunction, StepInput, Vocabulary, add_auxiliary_loss
from titan_core.api.parallel.microbatch import AuxiliaryLosses
from titan_core.api.parallel.step import GradientAccumulation
from titan_core.api.training import vocabulary
from titan_core.api.training.batch import IGNORE
from titan_core.loop.world import join_world
from titan_core.model import loss_head
from titan_core.model.build import build_parts
from titan_core.model.loss_head import attach
from titan_core.model.next_token import NextToken
from titan_core.model.streams import begin_streams


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


def test_a_chunk_needs_its_logits_their_gradient_and_little_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward in bf16, with a vocabulary that outweighs everything else."""
    vocab_size, chunk = 16384, 16
    monkeypatch.setattr(vocabulary, "LARGEST_PIECE", 2 * 4 * vocab_size)
    layout = replace(LAYOUT, vocab_size=vocab_size, embedding=(), blocks="blocks", head=("output",))
    part = ModelPart(Head(vocab_size), layout, NextToken())
    attach(part, chunk)
    tokens = torch.randint(0, vocab_size, (1, 128))
    with LargestLive() as live:
        part.forward_loss(first_step(Batch(tokens, tokens))).backward()
    logits = 2 * chunk * vocab_size
    weight = 2 * 8 * vocab_size  # the gradient of the layer's weight, for this chunk and for the earlier chunks
    assert live.largest < 2.3 * logits + 2 * weight
    assert live.largest < 2 * 128 * vocab_size


class Counted(nn.Linear):
    """Counts the positions whose logits it computes."""

    def __init__(self) -> None:
        super().__init__(DIM, VOCAB)
        self.positions = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.positions += hidden.shape[0] * hidden.shape[1]
        return super().forward(hidden)


def counted() -> tuple[ModelPart, Counted]:
    torch.manual_seed(0)
    model, head = SmallGPT(), Counted()
    model.output = head
    return ModelPart(model, LAYOUT, NextToken()), head


def gradients_in(part: ModelPart) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in part.module.named_parameters() if weight.grad is not None}


def test_logits_are_computed_once_a_step() -> None:
    part, head = counted()
    attach(part, 6)
    GradientAccumulation(part)(StepInput([batch(), batch()], 1, 0, 48.0))
    assert head.positions == 2 * 48


def test_gradients_of_one_microbatch_are_kept_at_a_time() -> None:
    """A pipeline may run several forward passes first, and a weight's gradient is large."""
    part, head = counted()
    attach(part, 6)
    losses = [part.forward_loss(first_step(batch())) / 7.0 for _ in range(3)]
    assert head.positions == 3 * 48
    for loss in losses:
        loss.backward()
    assert head.positions == 3 * 48 + 2 * 48  # the second and the third are computed again
    found = gradients_in(part)
    part, _ = counted()
    (3 * part.forward_loss(first_step(batch())) / 7.0).backward()
    for name, exact in gradients_in(part).items():
        torch.testing.assert_close(found[name], exact, rtol=1e-5, atol=1e-6)


class SharedGradient(nn.Linear):
    """The gradients of its two parameters are one tensor."""

    def __init__(self) -> None:
        super().__init__(DIM, VOCAB, bias=False)
        self.delta = nn.Parameter(torch.zeros(VOCAB, DIM))

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight + self.delta)


class WithSkip(nn.Linear):
    """Adds hidden states that do not pass through its argument."""

    def __init__(self, model: SmallGPT) -> None:
        super().__init__(DIM, VOCAB)
        self.skipped: list[Tensor] = []
        model.blocks[0].register_forward_hook(lambda module, arguments, output: self.skipped.append(output.mean()))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + self.skipped[0])


@pytest.mark.parametrize("head", ["shared gradient", "skip connection"])
def test_heads_that_are_no_plain_layer(head: str) -> None:
    found = []
    for chunk_tokens in (48, 6):
        torch.manual_seed(0)
        model = SmallGPT()
        model.output = SharedGradient() if head == "shared gradient" else WithSkip(model)
        part = ModelPart(model, LAYOUT, NextToken())
        attach(part, chunk_tokens)
        part.forward_loss(first_step(batch())).backward()
        found.append(gradients_in(part))
    assert found[0].keys() == found[1].keys()
    for name, exact in found[0].items():
        torch.testing.assert_close(found[1][name], exact, rtol=1e-5, atol=1e-6)


def test_an_auxiliary_loss_in_the_head_counts_as_in_a_block() -> None:
    found = []
    for chunk_tokens in (48, 6):
        part, head = counted()
        forward = head.forward

        def with_loss(hidden: Tensor, forward: Any = forward) -> Tensor:
            logits: Tensor = forward(hidden)
            return add_auxiliary_loss(logits, "squares", logits.square().sum())

        head.forward = with_loss  # type: ignore[method-assign]
        attach(part, chunk_tokens)
        losses = AuxiliaryLosses(0.01)
        GradientAccumulation(part)(StepInput([batch()], 1, 0, 5.0, losses))
        found.append({**losses.values, **gradients_in(part)})
    for name, exact in found[0].items():
        torch.testing.assert_close(found[1][name], exact, rtol=1e-5, atol=1e-6)


def test_gradients_of_inputs_and_of_weights_may_be_computed_one_after_the_other() -> None:
    """As zero-bubble pipelines do."""
    part, head = counted()
    attach(part, 6)
    hidden = torch.randn(3, 16, DIM, requires_grad=True)
    with part.computing(first_step(batch())):
        loss = head(hidden)
    (inputs,) = torch.autograd.grad(loss / 2.0, [hidden], retain_graph=True)
    weight, bias = torch.autograd.grad(loss / 3.0, [head.weight, head.bias], retain_graph=True)
    logits = nn.functional.linear(hidden, head.weight, head.bias)
    exact = NextToken()(logits, batch(), Vocabulary())
    for found, divisor, tensor in ((inputs, 2.0, hidden), (weight, 3.0, head.weight), (bias, 3.0, head.bias)):
        (gradient,) = torch.autograd.grad(exact / divisor, [tensor], retain_graph=True)
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="not kept for a second backward pass"):
        loss.backward()


def test_chunks_have_equal_lengths() -> None:
    """So that they compile once."""
    part = ModelPart(SmallGPT(), LAYOUT, Seen())
    attach(part, 3 * 9)  # nine of sixteen positions would leave seven
    part.forward_loss(first_step(batch())).backward()
    assert isinstance(part.objective, Seen)
    assert [one.tokens.shape[1] for one in part.objective.batches] == [8, 8]


def test_a_rank_with_some_columns_of_the_vocabulary_computes_longer_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_head, "LARGEST_CHUNK", 4 * VOCAB * 12)
    monkeypatch.setattr(loss_head.dist, "get_world_size", lambda group: 2)
    shapes = []
    for group in (None, object()):
        part = ModelPart(SmallGPT(), LAYOUT, Seen(), Vocabulary(cast(Any, group)))
        attach(part, 0)
        part.forward_loss(first_step(batch())).backward()
        assert isinstance(part.objective, Seen)
        shapes.append([one.tokens.shape[1] for one in part.objective.batches])
    assert shapes == [[4] * 4, [8] * 2]
