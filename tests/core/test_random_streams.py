"""A model's random draws depend only on seed, step, module and global element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import Batch, Dropout, Microbatch, RandomStream, UserError
from titan_core.api.model import dropout
from titan_core.api.model.random_streams import element_bits, element_bits_into, feature_words, token_words
from titan_core.api.parallel.microbatch import microbatch_scope
from titan_core.api.parallel.step import shape_inference

CPU = torch.device("cpu")


def microbatch(rows: Tensor, seq: int, columns: Tensor | None = None, step: int = 1, seed: int = 0) -> Microbatch:
    tokens = torch.zeros(len(rows), seq, dtype=torch.int64)
    return Microbatch(Batch(tokens, tokens, rows=rows, columns=columns), step, seed)


def named(module: nn.Module, name: str = "blocks.0.dropout") -> nn.Module:
    assert isinstance(module, RandomStream)
    module.begin(name, CPU)
    return module


def mask(p: float, shape: tuple[int, ...], step: int = 1, seed: int = 0, name: str = "blocks.0.dropout") -> Tensor:
    """Return the elements that dropout keeps of a global batch of ``shape``."""
    with microbatch_scope(microbatch(torch.arange(shape[0]), shape[1], step=step, seed=seed)):
        return named(Dropout(p), name)(torch.ones(shape)) != 0


def chi_square(one: Tensor, other: Tensor, p: float) -> float:
    """Return the chi-square statistic for the independence of two masks with known marginals (3 degrees of freedom)."""
    total = one.numel()
    kept = 1.0 - p
    statistic = 0.0
    for here, of_here in ((one, kept), (~one, p)):
        for there, of_there in ((other, kept), (~other, p)):
            expected = total * of_here * of_there
            statistic += (int((here & there).sum()) - expected) ** 2 / expected
    return statistic


LARGE = 30.0
"""A chi-square statistic with 3 degrees of freedom exceeds this once in 700,000 times."""


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_requested_fraction_is_dropped(p: float) -> None:
    kept = mask(p, (8, 128, 512))
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(float((~kept).double().mean()) - p) < 5 * deviation
    for dim in range(3):  # no two rows, positions or features are equal
        others = tuple(one for one in range(3) if one != dim)
        means = (~kept).double().mean(others)
        spread = (p * (1 - p) / (kept.numel() / kept.shape[dim])) ** 0.5
        assert float((means - p).abs().max()) < 6 * spread


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_of_neighbours_are_independent(p: float) -> None:
    kept = mask(p, (16, 128, 256))
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        "step": (kept, mask(p, (16, 128, 256), step=2)),
        "seed": (kept, mask(p, (16, 128, 256), seed=1)),
        "module": (kept, mask(p, (16, 128, 256), name="blocks.1.dropout")),
        "step and module": (mask(p, (16, 128, 256), step=2), mask(p, (16, 128, 256), name="blocks.1.dropout")),
    }
    for dim, axis in enumerate(("row", "position", "feature")):
        for distance in (1, 2, 4, 8):
            size = kept.shape[dim] - distance
            pairs[f"{axis} + {distance}"] = kept.narrow(dim, 0, size), kept.narrow(dim, distance, size)
    pairs["row and position"] = kept[1:, :-1], kept[:-1, 1:]
    pairs["position and feature"] = kept[:, 1:, :-1], kept[:, :-1, 1:]
    found = {name: chi_square(*pair, p) for name, pair in pairs.items()}
    assert max(found.values()) < LARGE, found
    # Whether the masks of two tokens agree is independent between features.
    agree = (kept[:, 1:] == kept[:, :-1])[:, ::2]
    rate = 1 - 2 * p * (1 - p)
    assert chi_square(agree[..., 1:], agree[..., :-1], 1 - rate) < LARGE


@pytest.mark.parametrize("bit", [0, 7, 23, 30])
def test_every_bit_is_fair(bit: int) -> None:
    words = (*token_words(torch.tensor(3), torch.arange(16), torch.arange(64)), feature_words(torch.tensor(3), 0, 512))
    ones = int((element_bits(words) >> bit & 1).sum())
    assert abs(ones - 2**18) < 5 * 2**8.5


def test_kept_elements_are_scaled_as_in_torch() -> None:
    hidden = torch.randn(2, 16, 24)
    with microbatch_scope(microbatch(torch.arange(2), 16)):
        ours = named(Dropout(0.3))(hidden)
    torch.manual_seed(0)
    theirs = F.dropout(hidden, 0.3)
    both = (ours != 0) & (theirs != 0)
    assert both.any() and (ours == 0).any()
    torch.testing.assert_close(ours[both], theirs[both])


def test_a_share_of_the_global_batch_gets_its_share_of_the_mask() -> None:
    whole = mask(0.4, (6, 8, 12))
    ones = torch.ones(2, 8, 12)
    with microbatch_scope(microbatch(torch.tensor([5, 2]), 8)):  # some of the sequences
        assert torch.equal(named(Dropout(0.4))(ones) != 0, whole[[5, 2]])
    columns = torch.tensor([0, 1, 6, 7]).expand(2, -1)  # some of the positions, as under context parallelism
    with microbatch_scope(microbatch(torch.tensor([5, 2]), 4, columns)):
        assert torch.equal(named(Dropout(0.4))(ones[:, :4]) != 0, whole[[5, 2]][:, [0, 1, 6, 7]])
    module = named(Dropout(0.4))
    assert isinstance(module, Dropout)
    module.expect(12)
    module.divide(1, 2)
    with microbatch_scope(
        microbatch(torch.tensor([5, 2]), 8)
    ):  # positions, features or neither, as under tensor parallelism
        assert torch.equal(module(ones[:, :4]) != 0, whole[[5, 2], 4:])
        assert torch.equal(module(ones[:, :, :6]) != 0, whole[[5, 2], :, 6:])
        assert torch.equal(module(ones[:, :, :6].view(2, 8, 2, 3)).flatten(2) != 0, whole[[5, 2], :, 6:])
        assert torch.equal(module(ones) != 0, whole[[5, 2]])
    with pytest.raises(ValueError, match=r"'blocks\.0\.dropout' of the model is already sharded"):
        module.divide(0, 2)


def test_uneven_shares_follow_torchs_sharding() -> None:
    whole, parts = mask(0.4, (1, 4, 7)), []
    for rank in range(3):
        module = named(Dropout(0.4))
        assert isinstance(module, Dropout)
        module.expect(7)
        module.divide(rank, 3)
        with microbatch_scope(microbatch(torch.arange(1), 4)):
            parts.append(module(torch.ones(1, 4, (3, 3, 1)[rank])) != 0)
    assert torch.equal(torch.cat(parts, dim=-1), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 8, 48), (1, 3, 40_000), (2, 50, 4, 173), (2, 3, 0)])
def test_all_kernels_compute_the_same(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    features = torch.Size(shape[2:]).numel()
    key = torch.tensor(-5)
    words = (*token_words(key, torch.arange(shape[0]), torch.arange(shape[1])), feature_words(key, 0, features))
    elements = torch.randn(shape[0] * shape[1], features, dtype=dtype)
    bits = torch.empty(elements.shape, dtype=torch.int32)
    element_bits_into(bits, torch.empty_like(bits), words)
    assert torch.equal(bits, element_bits(words))
    expected = dropout._masked(elements, words, 2**30, 2.0)
    assert expected.dtype == dtype
    for kernel in dropout._KERNELS.values():
        if kernel is not dropout._masked_in_one_kernel:  # this kernel compiles _masked
            assert torch.equal(kernel(elements, words, 2**30, 2.0), expected)


def test_gradients_pass_through_the_same_mask() -> None:
    module, hidden = named(Dropout(0.5)), torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    with microbatch_scope(microbatch(torch.arange(2), 4)):
        module(hidden).backward(torch.ones_like(hidden))
        assert hidden.grad is not None
        assert torch.equal(hidden.grad, 2.0 * (module(hidden) != 0))
        assert torch.autograd.gradcheck(module, hidden) and torch.autograd.gradgradcheck(module, hidden)
        turned = hidden.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        assert torch.equal(module(turned), module(hidden))


def test_only_random_words_are_saved_for_backward() -> None:
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    hidden = torch.randn(2, 16, 64, requires_grad=True)
    with microbatch_scope(microbatch(torch.arange(2), 16)), torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        named(Dropout(0.5))(hidden)
    assert sorted(kept) == [32, 32, 64]


def test_probabilities_0_and_1_and_evaluation() -> None:
    hidden = torch.randn(2, 4, 6)
    with microbatch_scope(microbatch(torch.arange(2), 4)):
        assert named(Dropout(0.1)).eval()(hidden) is hidden
        assert named(Dropout(0.0))(hidden) is hidden
        assert not named(Dropout(1.0))(hidden).any()
        assert torch.equal(named(Dropout(1e-12))(hidden), hidden)
    with pytest.raises(ValueError, match=r"p must be between 0 and 1, not 1\.5"):
        Dropout(1.5)
    assert repr(Dropout(0.25)) == "Dropout(p=0.25)"
    assert not list(Dropout(0.25).buffers()), "what a stream knows is no state"


def test_outside_a_run_draws_come_from_torchs_generator() -> None:
    hidden = torch.randn(2, 4, 6)
    torch.manual_seed(3)
    expected, numbers = F.dropout(hidden, 0.4), torch.rand(2, 4, 6)
    torch.manual_seed(3)
    assert torch.equal(Dropout(0.4)(hidden), expected)
    assert torch.equal(RandomStream().uniform(hidden), numbers)
    torch.manual_seed(3)
    with shape_inference():  # the results are unused
        assert torch.equal(named(Dropout(0.4))(hidden), expected)


def test_uniform_numbers() -> None:
    stream = named(RandomStream(), "blocks.0.router.noise")
    assert isinstance(stream, RandomStream)
    with microbatch_scope(microbatch(torch.arange(4), 64)):
        numbers = stream.uniform(torch.empty(4, 64, 32, dtype=torch.bfloat16))
        assert torch.equal(stream.uniform(torch.empty(4, 64, 2, 16)).flatten(2), numbers)
    assert numbers.dtype == torch.float32
    assert float(numbers.min()) >= 0.0 and float(numbers.max()) < 1.0
    assert abs(float(numbers.mean()) - 0.5) < 5 * (1 / 12 / numbers.numel()) ** 0.5
    with microbatch_scope(microbatch(torch.tensor([2]), 64)):
        assert torch.equal(stream.uniform(torch.empty(1, 64, 32))[0], numbers[2])


def anonymous_batch() -> Microbatch:
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    return Microbatch(Batch(tokens, tokens), step=1, seed=0)


def divided() -> nn.Module:
    module = named(Dropout(0.5))
    assert isinstance(module, Dropout)
    module.expect(12)
    module.divide(0, 2)
    return module


@pytest.mark.parametrize(
    ("make", "where", "shape", "message"),
    [
        (lambda: named(Dropout(0.5)), None, (2, 4, 6), r"module 'blocks\.0\.dropout' .*: draws outside a microbatch"),
        (lambda: Dropout(0.5), microbatch(torch.arange(2), 4), (2, 4, 6), "after the core had named its modules"),
        (lambda: named(Dropout(0.5)), anonymous_batch(), (2, 4, 6), "a batch that has no row indices; set Batch.rows"),
        (lambda: named(Dropout(0.5)), microbatch(torch.arange(2), 4), (2, 4), r"\[2, 4, features\.\.\.\], not \[2, 4\]"),
        (lambda: named(Dropout(0.5)), microbatch(torch.arange(2), 4), (2, 3, 6), r"not \[2, 3, 6\]"),
        (lambda: named(Dropout(0.5)), microbatch(torch.arange(2), 4), (8, 6), r"not \[8, 6\]"),
        (divided, microbatch(torch.arange(2), 4), (2, 3, 12), r"\[2, 4, features\.\.\.\] or \[2, 2, features\.\.\.\]"),
        (divided, microbatch(torch.arange(2), 4), (2, 4, 7), "12 features per token, or this rank's share of 6, not 7"),
    ],
)
def test_a_tensor_without_a_place_in_the_global_batch_is_refused(
    make: Callable[[], nn.Module], where: Microbatch | None, shape: tuple[int, ...], message: str
) -> None:
    with microbatch_scope(where), pytest.raises(UserError, match=message):
        make()(torch.ones(shape))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.first, self.second = Dropout(0.3), Dropout(0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.second(self.linear(self.first(hidden)))


def test_one_compiled_graph_serves_all_blocks_and_steps() -> None:
    blocks = nn.ModuleList(Block() for _ in range(10))
    for name, module in blocks.named_modules():
        if isinstance(module, RandomStream):
            module.begin(name, CPU)
    frames = torch._dynamo.testing.CompileCounterWithBackend("eager")
    for compiled in (False, True):
        outputs = []
        for block in blocks if compiled else ():
            block.compile(backend=frames, fullgraph=True)
        for step in range(4):
            hidden = torch.ones(2, 4, 6, requires_grad=True)
            with microbatch_scope(microbatch(torch.arange(2) + step, 4, step=step)):
                output = hidden
                for block in blocks:
                    output = block(output)
                output.sum().backward()
            outputs.append((output.detach(), hidden.grad))
        if not compiled:
            expected = outputs
    torch.testing.assert_close(outputs, expected)
    assert [torch.equal(one == 0, other == 0) for (one, _), (other, _) in zip(outputs, expected, strict=True)] == [True] * 4
    assert frames.frame_count == 1
