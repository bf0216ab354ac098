"""Windows, capped scores, scales, sinks and narrow values: every way to compute attention gives its formula in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from titan_core.api import CausalAttention, Decoding, causal_attention
from titan_core.api.model.attention import attend, flex_attend
from titan_core.api.model.attention_mask import block_mask

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

HEADS, KV_HEADS, WIDTH = 4, 2, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "window of several bands": {"window": 70},
    "window of all": {"window": 500},
    "cap": {"softcap": 1.5},
    "scale": {"scale": 0.9},
    "sinks": {"sinks": True},
    "all": {"window": 33, "softcap": 1.5, "scale": 0.9, "sinks": True},
}


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return attention in fp64, from all scores."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    order = torch.arange(q.shape[2])
    distance = order[:, None] - order
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v


def inputs(batch: int, seq: int, narrow: bool, masked: bool) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Return queries, keys and values, which need gradients, the documents of the positions, and a sink for each head."""
    generator = torch.Generator().manual_seed(seq + batch)
    widths = (WIDTH, WIDTH, WIDTH - 2 if narrow else WIDTH)
    sizes = zip((HEADS, KV_HEADS, KV_HEADS), widths, strict=True)
    tensors = [torch.randn(batch, heads, seq, width, generator=generator, requires_grad=True) for heads, width in sizes]
    documents = (torch.rand(batch, seq, generator=generator) < 0.05).long().cumsum(1) if masked else None
    return tensors, documents, torch.randn(HEADS, generator=generator, requires_grad=True)


def close(output: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    """Assert that two results, and their gradients, are equal."""
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(output, expected.float(), atol=2e-5, rtol=1e-4)
    found = torch.autograd.grad(output, tensors, gradient)
    wanted = torch.autograd.grad(expected, tensors, gradient.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.quick_rows(8)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("narrow", [False, True], ids=["", "narrow values"])
@pytest.mark.parametrize(("batch", "seq"), [(1, 50), (2, 200)])
def test_the_mixer_computes_the_formula(options: dict[str, Any], masked: bool, narrow: bool, batch: int, seq: int) -> None:
    tensors, documents, sinks = inputs(batch, seq, narrow, masked)
    has_sinks = options.get("sinks", False)
    output = CausalAttention(**options)(*tensors, documents, **({"sinks": sinks} if has_sinks else {}))
    plain = {name: value for name, value in options.items() if name != "sinks"}
    expected = formula(*tensors, documents, sinks if has_sinks else None, **plain)
    close(output, expected, [*tensors, sinks] if has_sinks else tensors)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_some_of_the_queries_see_what_they_see_among_all(options: dict[str, Any]) -> None:
    """As the last positions, and as any."""
    tensors, documents, sinks = inputs(2, 150, True, True)
    q, k, v = tensors
    plain: dict[str, Any] = {name: value for name, value in options.items() if name != "sinks"}
    plain["sinks"] = sinks if options.get("sinks") else None
    whole = attend(q, k, v, documents=documents, **plain)
    last = attend(q[:, :, 90:], k, v, documents=documents, **plain)
    torch.testing.assert_close(last, whole[:, :, 90:])
    columns = torch.tensor([[3, 140, 70]])
    some = attend(q[:, :, columns[0]], k, v, documents=documents, columns=columns, **plain)
    torch.testing.assert_close(some, whole[:, :, columns[0]])


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
def test_flex_attention_computes_the_formula(options: dict[str, Any], masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, but uncompiled: then it has a backward on CPUs, which torch refuses to use."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    tensors, documents, sinks = inputs(2, 200, True, masked)
    plain = {name: value for name, value in options.items() if name != "sinks"}
    mask = block_mask(torch.zeros(2, 200, dtype=torch.long) if documents is None else documents, None, plain.get("window"))
    own = sinks if options.get("sinks") else None
    rest = {name: value for name, value in plain.items() if name != "window"}
    output = flex_attend(*tensors, mask, **rest, sinks=own)
    close(output, formula(*tensors, documents, own, **plain), [*tensors, sinks] if own is not None else tensors)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("part", [3, 40], ids=["short parts", "long parts"])
def test_a_cache_is_enough(options: dict[str, Any], part: int) -> None:
    """Prompts of two lengths, padded, in parts; then a token at a time. A window keeps no more than it sees."""
    lengths, total = [31, 11], 60
    tensors, _, sinks = inputs(2, total, True, False)
    q, k, v = (tensor.detach() for tensor in tensors)
    mixer = CausalAttention(**options)
    more: dict[str, Any] = {"sinks": sinks.detach()} if options.get("sinks") else {}
    expected = mixer(q, k, v, **more)
    decoding = Decoding(2, total)
    found = [torch.empty(0), torch.empty(0)]

    def compute(positions: Tensor, real: Tensor | None) -> None:
        rows = torch.arange(2)[:, None]
        own = [tensor.transpose(1, 2)[rows, positions].transpose(1, 2) for tensor in (q, k, v)]
        with decoding.computing(positions, int(positions.max()) + 1, real):
            output = mixer(*own, **more)
        for row in range(2):
            kept = positions[row] < (total if real is None else real[row])
            piece = output[row][:, kept]
            found[row] = torch.cat((found[row], piece), dim=1) if found[row].numel() else piece

    for first in range(0, max(lengths), part):
        compute(torch.arange(first, min(first + part, max(lengths))).expand(2, -1), torch.tensor(lengths))
    for step in range(total - max(lengths)):
        compute(torch.tensor([[length + step] for length in lengths]), None)
    for row in range(2):
        torch.testing.assert_close(found[row], expected[row, :, : found[row].shape[1]])
    (cache,) = decoding._caches.values()
    assert cache.keys.shape[1] == min(total, options.get("window", total))


def test_a_mixer_keeps_a_state_of_its_own() -> None:
    decoding, mixer = Decoding(2, 8), torch.nn.Identity()
    assert decoding.state(mixer) == {} and decoding.mixers == {mixer}
    decoding.state(mixer)["sum"] = torch.ones(2)
    with decoding.computing(torch.arange(3).expand(2, -1), 3, torch.tensor([3, 1])):
        assert decoding.real.tolist() == [[True, True, True], [True, False, False]]
    assert decoding.state(mixer)["sum"].tolist() == [1, 1]


def test_options_are_checked() -> None:
    for options in ({"window": 0}, {"softcap": -1.0}, {"scale": 0.0}):
        with pytest.raises(ValueError, match="must be positive"):
            CausalAttention(**options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="cannot have"):
            causal_attention(4, **options)  # type: ignore[arg-type]
    (q, k, v), _, sinks = inputs(1, 4, False, False)
    with pytest.raises(ValueError, match="pass sinks exactly if"):
        CausalAttention()(q, k, v, sinks=sinks)
    with pytest.raises(ValueError, match="pass sinks exactly if"):
        CausalAttention(sinks=True)(q, k, v)
