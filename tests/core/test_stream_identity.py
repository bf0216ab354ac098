"""A saved position is valid only in its own stream, and refused in any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.letters import BYTE, letters, stream
from harness.loaders import LENGTHS, MIXED, close, loaders, loaders_of, merged, plan
from titan_core.api import TextTokenizer, UserError
from titan_core.api.data.dataset import DatasetSpec, FormatSpec, StreamSpec
from titan_core.data.loader import DataLoader
from titan_core.data.streams import open_sources


def test_a_document_that_became_shorter_is_reported() -> None:
    (loader,) = loaders_of(stream(letters("30,30"), plan=plan(1, global_size=1, shards=1)))
    loader.next_step()
    state = merged([loader])
    (other,) = loaders_of(stream(letters("30,30"), plan=plan(1, global_size=1, shards=1)))
    state["shards"]["0"]["streams"][0]["used"] = 40
    other.load_state_dict(state)
    with pytest.raises(UserError, match="data position mismatch"):
        other.next_step()
    close([loader], [other])


def test_positions_in_another_stream_are_refused() -> None:
    state = merged(loaders(1))
    with pytest.raises(UserError, match=r"data\.logical_shards = 4: was 8 when the position in the data was saved"):
        loaders(1, shards=4)[0].load_state_dict(state)
    (mixed,) = loaders_of(stream(*MIXED, plan=plan(1)))
    with pytest.raises(UserError, match=r"data\.mixture = .*: was .* when the position in the data was saved"):
        mixed.load_state_dict(state)


CHANGES: dict[str, tuple[Any, str]] = {
    "seed": (lambda spec: replace(spec, seed=1), r"training\.seed = 1: was 0 when"),
    "shards": (lambda spec: replace(spec, plan=plan(1, shards=4)), r"data\.logical_shards = 4: was 8 when"),
    "buffer": (lambda spec: replace(spec, shuffle_buffer=9), r"data\.shuffle_buffer = 9: was 5 when"),
    "no buffer": (lambda spec: replace(spec, shuffle_buffer=0), r"data\.shuffle_buffer = 0: was 5 when"),
    "weight": (
        lambda spec: replace(spec, datasets=(letters(LENGTHS, weight=2.0), MIXED[1])),
        r"dataset 'letters': its weight = 2\.0: was 3\.0 when",
    ),
    "path": (
        lambda spec: replace(spec, datasets=(letters(f"stream:{LENGTHS}", weight=3.0), MIXED[1])),
        r"its path = 'stream:.* was .* when",
    ),
    "number": (lambda spec: replace(spec, datasets=(letters(f"{LENGTHS},1", weight=3.0), MIXED[1])), r"its path = "),
    "split": (
        lambda spec: replace(spec, datasets=(with_request(spec, split="train"), MIXED[1])),
        r"its split = 'train'.* was None when",
    ),
    "field": (
        lambda spec: replace(spec, datasets=(with_request(spec, text_field="body"), MIXED[1])),
        r"its text_field = 'body'.* was 'text' when",
    ),
    "format": (
        lambda spec: replace(spec, datasets=(with_request(spec, format=FormatSpec("joined", "data.format")), MIXED[1])),
        r"its format = 'joined'.* was None when|its text_field = None",
    ),
    "order": (lambda spec: replace(spec, datasets=spec.datasets[::-1]), r"data\.mixture = .* was .* when"),
    "one dataset less": (lambda spec: replace(spec, datasets=spec.datasets[:1]), r"data\.mixture = .* was .* when"),
}


def with_request(spec: StreamSpec, **changes: Any) -> DatasetSpec:
    return replace(spec.datasets[0], context=replace(spec.datasets[0].context, **changes))


@pytest.mark.parametrize("change", CHANGES)
def test_a_position_is_valid_only_in_its_own_stream(change: str) -> None:
    """Everything that determines the order of tokens is part of a stream's identity."""
    make, message = CHANGES[change]
    spec = stream(*MIXED, plan=plan(1), shuffle_buffer=5)
    (first,), (same,), (other,) = loaders_of(spec), loaders_of(replace(spec)), loaders_of(make(spec))
    state = merged([first])
    same.load_state_dict(state)
    with pytest.raises(UserError, match=message):
        other.load_state_dict(state)


def test_positions_of_the_stored_order_are_refused() -> None:
    """Checkpoints from before orders were computed name no order."""
    spec = stream(*MIXED, plan=plan(1))
    ((first,), (other,)) = loaders_of(spec), loaders_of(spec)
    state = merged([first])
    ordered = [key for key, value in state["stream_of"].items() if key.endswith(".order") and value is not None]
    for key in ordered:
        del state["stream_of"][key]
    with pytest.raises(UserError) as caught:
        other.load_state_dict(state)
    assert str(caught.value).count("its order = ") == len(ordered) == 2
    assert "its order = 'documents, version 2'" in str(caught.value)
    assert "saved in another order (one of an older version of Titan)" in str(caught.value)
    assert "resume with the version of Titan that saved it, or start a new run" in str(caught.value)
    other.load_state_dict(state, ["dataset.*.order"])


def test_another_tokenizer_is_another_stream(tmp_path: Path) -> None:
    class Shifted(TextTokenizer):
        vocab_size = BYTE.vocab_size + 1

        def encode_document(self, text: str) -> Any:
            return BYTE.encode_document(text)

        decode = BYTE.decode

    spec = stream(letters(LENGTHS), plan=plan(1))
    state = merged(loaders_of(spec))
    other = DataLoader(spec, open_sources(spec), Shifted(), 0)
    with pytest.raises(UserError, match=r"tokenizer = .* when the position in the data was saved"):
        other.load_state_dict(state)
