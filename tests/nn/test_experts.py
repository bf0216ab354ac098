"""Products of experts, moving tokens to experts and back, and the choice of experts, against loops and sorts."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nn import experts as code
from titan_nn.experts import ExpertChoice, GroupedLinear, combine, grouped_linear, permute_to_experts

COUNTS = torch.tensor([3, 0, 4, 1])
TAIL = 2
OUT, IN = 24, 16


def by_loop(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the product row by row, and zeros for the others."""
    owners = [expert for expert, count in enumerate(counts.tolist()) for _ in range(count)]
    results = [row @ weight[expert].T for row, expert in zip(rows, owners, strict=False)]
    return torch.stack([*results, *(rows.new_zeros(weight.shape[1]) for _ in range(rows.shape[0] - len(owners)))])


def gradients(product: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    result = product(rows, weight, COUNTS)
    generator = torch.Generator().manual_seed(1)
    result.backward(torch.randn(result.shape, generator=generator).bfloat16().to(result.dtype))  # the same in each dtype
    assert rows.grad is not None and weight.grad is not None
    return result.detach(), rows.grad, weight.grad


def operands(dtype: torch.dtype = torch.float32, out: int = OUT) -> tuple[Tensor, Tensor]:
    return torch.randn(int(COUNTS.sum()) + TAIL, IN, dtype=dtype), torch.randn(4, out, IN, dtype=dtype)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_and_its_gradients_equal_a_loop(dtype: torch.dtype, kernel: bool) -> None:
    rows, weight = operands(dtype)
    with mock.patch.object(code, "_has_kernel", code._has_kernel if kernel else lambda *_: False):
        found = gradients(grouped_linear, rows, weight)
    # The reference is fp32: row by row, it would round each sum to bf16.
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, reference in zip(found, gradients(by_loop, rows.float(), weight.float()), strict=True):
        torch.testing.assert_close(ours.float(), reference, rtol=limit, atol=limit)
    assert found[2][1].count_nonzero() == 0  # zeros, not None: the expert has no rows


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "loop"])
def test_the_gradient_of_a_weight_is_that_of_autograd(kernel: bool) -> None:
    rows, weight = operands()
    weight.requires_grad_()
    gradient = torch.randn(rows.shape[0], OUT)
    by_loop(rows, weight, COUNTS)[:-TAIL].backward(gradient[:-TAIL])
    gradient[-TAIL:] = torch.nan
    with mock.patch.object(code, "_in_kernel", code._in_kernel if kernel else lambda *_: False):
        torch.testing.assert_close(code.grouped_weight_gradient(gradient, rows, COUNTS), weight.grad)


def test_the_module_computes_what_the_function_does() -> None:
    rows, weight = operands()
    for ours, reference in zip(
        gradients(GroupedLinear(), rows, weight), gradients(grouped_linear, rows, weight), strict=True
    ):
        assert torch.equal(ours, reference)


def test_a_transposed_weight_needs_no_copy_and_no_loop() -> None:
    rows, weight = operands()
    transposed = weight.mT.contiguous().mT
    assert code._has_kernel(rows, transposed) == code._has_kernel(rows, weight) == code._in_kernel(rows, (OUT, IN))
    torch.testing.assert_close(grouped_linear(rows, transposed, COUNTS), by_loop(rows, weight, COUNTS))


@pytest.mark.parametrize("out", [OUT, 7], ids=["kernel", "loop"])
def test_rows_of_no_expert_have_no_effect_whatever_they_hold(out: int) -> None:
    rows, weight = operands(out=out)
    clean = gradients(grouped_linear, rows, weight)
    rows[-TAIL:] = torch.tensor([[torch.nan], [torch.inf]])
    for ours, reference in zip(gradients(grouped_linear, rows, weight), clean, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0.0, atol=0.0)
    assert clean[0][-TAIL:].count_nonzero() == 0 and clean[1][-TAIL:].count_nonzero() == 0


def test_no_rows_at_all() -> None:
    rows, weight = torch.empty(0, IN, requires_grad=True), torch.randn(4, OUT, IN, requires_grad=True)
    grouped_linear(rows, weight, torch.zeros(4, dtype=torch.int64)).sum().backward()
    assert rows.grad is not None and rows.grad.shape == (0, IN)
    assert weight.grad is not None and weight.grad.count_nonzero() == 0


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 7, IN), None), ((4, OUT, IN), (1, 1, 1))],
    ids=["no multiple of 16 bytes", "overlaps itself, as in the trial"],
)
def test_weights_that_the_kernel_refuses(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    weight = torch.randn(shape) if strides is None else torch.randn(99).as_strided(shape, strides)
    rows, _ = operands()
    torch.testing.assert_close(grouped_linear(rows, weight, COUNTS), by_loop(rows, weight, COUNTS))


def test_one_graph_holds_the_whole_way_of_a_token() -> None:
    weight = torch.randn(4, IN, IN, requires_grad=True)

    def through(tokens: Tensor, scores: Tensor) -> Tensor:
        chosen = ExpertChoice(4, 2)(scores)
        rows, counts, places = permute_to_experts(tokens, chosen, 4)
        return combine(grouped_linear(rows, weight, counts), scores.gather(1, chosen), places)

    tokens, scores = torch.randn(6, IN, requires_grad=True), torch.rand(6, 4)
    compiled = torch.compile(through, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, scores), through(tokens, scores))


def test_tokens_pass_through_their_experts_and_return() -> None:
    tokens, weights = torch.randn(5, 3, dtype=torch.double), torch.rand(5, 2, dtype=torch.double)
    chosen = torch.tensor([[3, 0], [0, 3], [4, 3], [0, 1], [3, 4]])  # nobody chooses expert 2
    rows, counts, places = permute_to_experts(tokens, chosen, 5)
    assert counts.tolist() == [3, 1, 0, 4, 2]
    assert torch.equal(rows, tokens[[0, 1, 3, 3, 0, 1, 2, 4, 2, 4]])
    factors = torch.repeat_interleave(torch.arange(1.0, 6, dtype=torch.double), counts)[:, None]
    expected = sum(tokens * weights[:, [k]] * (1.0 + chosen[:, [k]]) for k in range(2))
    torch.testing.assert_close(combine(rows * factors, weights, places), expected)


def test_gradients_of_moving_tokens_equal_numerical_differences() -> None:
    chosen = torch.tensor([[3, 0], [0, 3], [4, 3]])
    tokens = torch.randn(3, 2, dtype=torch.double, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.double, requires_grad=True)

    def through(tokens: Tensor, weights: Tensor) -> Tensor:
        rows, _, places = permute_to_experts(tokens, chosen, 5)
        return combine(F.pad(rows**2, (0, 0, 0, 1), value=9.0), weights, places)

    assert torch.autograd.gradcheck(through, (tokens, weights))


def test_of_equal_scores_the_lower_index_is_chosen() -> None:
    scores = torch.tensor([[0.5, 0.7, 0.5, 0.7, 0.1], [0.0, -0.0, 0.0, -0.0, 0.0], [-1.0, -2.0, -1.0, -torch.inf, -2.0]])
    assert ExpertChoice(5, 3)(scores).tolist() == [[1, 3, 0], [0, 1, 2], [0, 2, 1]]


def test_the_choice_equals_a_stable_sort() -> None:
    scores = torch.randint(-9, 9, (500, 64)).float() * 1e-3
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(ExpertChoice(64, 8)(scores), expected)
    distinct = torch.randn(500, 64) * 10.0 ** torch.randint(-30, 30, (500, 64))
    assert torch.equal(ExpertChoice(64, 8)(distinct), distinct.topk(8).indices)


def test_the_bias_is_added_for_the_choice_and_saved() -> None:
    choice = ExpertChoice(3, 1, bias=True)
    assert list(choice.state_dict()) == ["bias"] and list(ExpertChoice(3, 1).state_dict()) == []
    assert choice.bias is not None and choice.bias.dtype == torch.float32
    scores = torch.tensor([[0.1, 0.2, 0.3]])
    assert choice(scores).item() == 2
    choice.bias[0] = 0.5
    assert choice(scores).item() == 0


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    # The two highest scores of a group decide: 0.8, 1.1 and 1.0. The best expert of all is in the first.
    scores = torch.tensor([[0.8, 0.0, 0.0, 0.6, 0.5, 0.2, 0.7, 0.3, 0.3]])
    choose = ExpertChoice(9, 3, groups=3, chosen_groups=2)
    assert choose(scores).tolist() == [[6, 3, 4]]
    assert ExpertChoice(9, 3)(scores).tolist() == [[0, 6, 3]]


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"experts": 4, "per_token": 5}, "cannot choose 5 of 4 experts"),
        ({"experts": 6, "per_token": 1, "groups": 4}, "in 1 of 4 groups"),
        ({"experts": 8, "per_token": 3, "groups": 4}, "cannot choose 3 of 8 experts in 1 of 4 groups"),
        ({"experts": 8, "per_token": 3, "groups": 2, "chosen_groups": 3}, "in 3 of 2 groups"),
        ({"experts": 4, "per_token": 1, "groups": 4}, "fewer than the two experts"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(sizes: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ExpertChoice(**sizes)
