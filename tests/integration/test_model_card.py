"""The model card of an export: its front matter is YAML, and no text of the run is markup in it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from titan_ckpt.foreign.hf_export import card
from titan_ckpt.format.stored import Manifest

ATTACKS = (
    "<img src=x onerror=hit()>", "[a](javascript:hit())", "![a](x)", "|a|b|\n|-|-|", "</td><script>hit()</script>",
    "\n---\nlicense: mit\n---\n# b", "`a` **b** _c_ ~~d~~ $x$", "<!-- ", "&lt;img src=x onerror=hit()&gt;", '"], x: [',
    "\\|", "https://user:s3cret@host", "<https://evil.example>", "{{ hit() }}", "#", "- a", "1. a", "> a",
    "\t\u2028\u0085\x7f\x1b[31m",
)  # fmt: skip


@pytest.mark.parametrize("text", ATTACKS)
def test_no_text_is_markup(text: str) -> None:
    config: dict[str, Any] = {
        "job": {"description": text},
        "training": {"dataset": text, "dataset_path": text, "seq_len": 8, "seed": 1},
        "data": {"mixture": [{"dataset": text, "dataset_path": text, "weight": 0.5}]},
        "optimizer": {"name": text}, "model": {"tokenizer": text},
    }  # fmt: skip
    about = {"model": text, "model_name": text, "torch": text, "config": config}
    written = card(Manifest(3, "", about, {"tokens_seen": 5}, {}, {}))
    empty, front, body = written.split("---\n", 2)
    assert empty == "" and yaml.safe_load(front) == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["titan", text]
    }  # fmt: skip
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(body)
    inner = [child for token in tokens for child in token.children or ()]
    assert {token.type for token in [*tokens, *inner]} <= {
        "heading_open", "heading_close", "inline", "text", "paragraph_open", "paragraph_close", "table_open", "table_close",
        "thead_open", "thead_close", "tbody_open", "tbody_close", "tr_open", "tr_close", "th_open", "th_close", "td_open",
        "td_close", "text_special",
    }  # fmt: skip
    assert sum(token.type == "heading_open" for token in tokens) == 1 and "s3cret" not in body
    if "s3cret" not in text and "\x1b" not in text:
        shown = "".join(child.content for child in inner)
        assert " ".join(text.split()) in shown
