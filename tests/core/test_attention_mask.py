"""Each query of packed sequences sees earlier positions of its document; FlexAttention's blocks say the same, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from titan_core.api import Batch, CausalAttention, Microbatch, ModelLayout, ModelPart, causal_attention
from titan_core.api.model import attention_mask
from titan_core.api.model.attention import flex_attend
from titan_core.api.model.attention_mask import block_mask, document_mask
from titan_core.model.next_token import NextToken

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def test_queries_see_earlier_keys_of_their_document() -> None:
    documents = torch.tensor([[0, 0, 1, 1]])
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    assert torch.equal(document_mask(documents), expected[None, None])  # type: ignore[arg-type]
    own = torch.tensor([[3, 0]])
    assert torch.equal(document_mask(documents, own), expected[None, None, own[0]])  # type: ignore[arg-type]


def packed(seq: int, decreasing: bool) -> Tensor:
    documents = (torch.rand(2, seq, generator=torch.Generator().manual_seed(seq)) < 0.02).long().cumsum(1)
    return documents.flip(1) if decreasing else documents


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(("seq", "decreasing"), [(256, False), (300, False), (384, True)])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 100, 200])
def test_blocks_are_those_of_the_mask(seq: int, decreasing: bool, ranks: int, window: int | None) -> None:
    documents = packed(seq, decreasing)
    chunks = torch.arange(seq).expand(2, -1).chunk(2 * ranks, 1)
    for rank in range(ranks):
        columns = torch.cat((chunks[rank], chunks[-1 - rank]), 1)
        of_queries = documents.gather(1, columns)

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = columns[batch, query] - key  # noqa: B023
            seen = (of_queries[batch, query] == documents[batch, key]) & (distance >= 0)  # noqa: B023
            return seen if window is None else seen & (distance < window)

        torch_mask = create_block_mask(sees, 2, None, columns.shape[1], seq, device="cpu")
        mask = block_mask(documents, columns, window)
        if window is None or ranks == 1 or seq == 300:
            assert torch.equal(mask.to_dense(), torch_mask.to_dense())
        else:  # a block of queries from both chunks may be evaluated where neither sees a key
            assert (mask.to_dense() >= torch_mask.to_dense()).all()
        assert torch.equal(mask.full_kv_num_blocks, torch_mask.full_kv_num_blocks)
        assert mask.shape == torch_mask.shape
        q = torch.randn(2, 4, columns.shape[1], 16)
        k, v = (torch.randn(2, 2, seq, 16) for _ in "kv")
        dense = document_mask(documents, columns, window)
        expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)  # type: ignore[arg-type]
        torch.testing.assert_close(flex_attend(q, k, v, mask), expected)


def test_a_block_that_the_end_of_the_sequence_cuts_off_is_not_full() -> None:
    full = block_mask(torch.zeros(1, 300, dtype=torch.long)).full_kv_num_blocks
    assert full is not None and full.tolist() == [[[0, 1, 0]]]  # of keys, for each block of queries


@pytest.mark.parametrize(("window", "full"), [(200, [0, 0, 0]), (255, [0, 0, 0]), (256, [0, 1, 1]), (384, [0, 1, 2])])
def test_a_block_that_a_window_cuts_off_is_not_full(window: int, full: list[int]) -> None:
    """One document, in three blocks: the last query of a block is 255 after the first key of the block before."""
    mask = block_mask(torch.zeros(1, 384, dtype=torch.long), torch.arange(384)[None], window)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_num_blocks.flatten().tolist() == full


def test_documents_in_any_order_are_masked_exactly() -> None:
    documents = torch.arange(256)[None] % 3
    q = torch.randn(1, 2, 256, 16)
    mask = block_mask(documents)
    torch.testing.assert_close(flex_attend(q, q, q, mask), CausalAttention()(q, q, q, documents))


class Blocks(nn.Module):
    """A model whose blocks are nothing but attention."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(CausalAttention() for _ in range(count))
        self.head = nn.Linear(16, 8)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)[:, None]
        for block in self.blocks:
            x = x + block(x, x, x, documents)
        return self.head(x[:, 0])  # type: ignore[no-any-return]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The masks that are made, which are those of GPUs."""
    masks: list[Any] = []

    def make(documents: Tensor, columns: Tensor | None = None, window: int | None = None) -> Any:
        masks.append(block_mask(documents, columns, window))
        return masks[-1]

    monkeypatch.setattr(attention_mask, "document_mask", make)
    yield masks
    torch.compiler.reset()


def test_a_mask_that_exists_is_kept(made: list[Any]) -> None:
    tokens = torch.zeros(1, 256, dtype=torch.long)
    one = Microbatch(Batch(tokens, tokens, documents=packed(256, False)[:1]), step=1, seed=1)
    one.make_document_mask()
    one.make_document_mask()
    assert len(made) == 1 and one.document_mask is made[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_is_made_once_for_a_microbatch(made: list[Any], compiled: bool) -> None:
    layout = ModelLayout(
        num_blocks=3, dim=16, vocab_size=8, max_seq_len=256, embedding=("embedding",), blocks="blocks", head=("head",),
        mixers={"blocks.*": causal_attention(1)}, masks_documents=True,
    )  # fmt: skip
    part = ModelPart(Blocks(3), layout, NextToken())
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    tokens = torch.arange(256)[None] % 8
    for number in range(3):
        documents = packed(256, False)[:1] + torch.arange(256) // (50 + number)
        batch = Batch(tokens, tokens, documents=documents)
        with torch.no_grad():
            for block in part.blocks().values() if compiled and not number else ():
                block.compile(backend=backend, fullgraph=True)
            loss = part.forward_loss(Microbatch(batch, step=1, seed=1))
            assert len(made) == number + 1
            unmasked = ModelPart(part.module, layout, NextToken()).forward_loss(Microbatch(Batch(tokens, tokens), 1, 1))
            assert loss != unmasked
    # One graph with a mask and one without serve all blocks and all microbatches.
    assert len(graphs) == (2 if compiled else 0)
