"""Every export can be used by transformers as it is: its tokenizer has Titan's ids, and its model generates."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_core.api import Ref, TokenizerContext
from titan_core.api.data.tokenizer import TokenizerSpec
from titan_core.cli.main import main
from titan_testing.jobs import run_recipe

TEXTS = ("", "Hello  world, it's 12345\n\n\tdef f(x):\r\n", "naïve café — Übergröße", "Привет 你好 🙂🚀👩‍👩‍👧", "\x00\x7f ")
MERGES = ("he", "ll", "hell", "hello", " w", "or", " wor", "ld", " world", "12", "123", "ï", "🙂", "def", "  ")
SETTINGS: dict[str, object] = {
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 2,
    "training.steps": 1,
    "checkpoint.enable": "true",
    "job.device": "cpu",
}


def write_ranks(file: Path) -> Path:
    tokens = [bytes([byte]) for byte in range(256)] + [merge.encode() for merge in MERGES]
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return file


def built(kind: str, folder: Path) -> TokenizerSpec:
    """Return a tokenizer of ``kind``, whose files it writes."""
    if kind == "byte":
        return TokenizerSpec(Ref("titan_core.data.byte_tokenizer:build"), TokenizerContext(None, section=None))
    path = write_ranks(folder / "tokenizer.model")
    return TokenizerSpec(Ref("titan_models_llama.tokenizer:build"), TokenizerContext(str(path), section=None))


@pytest.mark.parametrize("kind", ["byte", "llama3"])
def test_an_exported_tokenizer_has_the_same_ids_and_texts(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours: Any = built(kind, tmp_path).open()
    for name, contents in ours.tokenizer_files().items():
        (tmp_path / name).write_text(contents, encoding="utf-8")
    (tmp_path / "tokenizer.model").unlink(missing_ok=True)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) <= ours.vocab_size
    assert [theirs.bos_token_id] == ours.begin_ids
    assert [theirs.eos_token_id] == ours.end_ids
    for text in TEXTS:
        ids = [int(token) for token in ours.encode_document(text)]
        assert theirs(text)["input_ids"] == ids[:-1]
        assert theirs.decode(ids, skip_special_tokens=True) == text
        assert theirs.decode(ids) == ours.decode(ids)
    for ids in ([0xFF, 65], [0xE4, 0xBD, 65], [0xF0, 0x9F, 0x99]):  # not UTF-8
        assert theirs.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["byte", pytest.param("llama3", marks=pytest.mark.full)])
def test_transformers_generates_from_an_export(kind: str, tied: bool, in_tmp: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    spec = built(kind, in_tmp)
    ours = spec.open()
    size = f"dim = 32, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 48, vocab_size = {ours.vocab_size + 6}"
    chosen: dict[str, object] = {
        **SETTINGS,
        "model.args": f"{{{size}, tie_embeddings = {str(tied).lower()}}}",
        "model.tokenizer": kind,
        "job.description": "a |test| <b>of</b> `cards`",
    }
    if spec.context.path is not None:
        chosen["model.tokenizer_path"] = spec.context.path
    run_recipe("llama3_debug", chosen)
    assert main(["checkpoint", "convert", "outputs/llama3_debug", "exported"]) == 0
    tokenizer, model = AutoTokenizer.from_pretrained("exported"), AutoModelForCausalLM.from_pretrained("exported")
    assert GenerationConfig.from_pretrained("exported").eos_token_id == tokenizer.eos_token_id
    prompt = tokenizer("Hello 🙂", return_tensors="pt")
    assert prompt["input_ids"][0].tolist() == [int(token) for token in ours.encode_document("Hello 🙂")][:-1]
    written = model.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    with torch.no_grad():
        assert written[0, prompt["input_ids"].shape[1]] == model(**prompt).logits[0, -1].argmax()
    card = Path("exported/README.md").read_text(encoding="utf-8")
    assert card.startswith(
        '---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: ["titan", "llama3"]\n---\n'
    )
    assert r"| Recipe | a \|test\| \<b\>of\</b\> \`cards\` |" in card
    assert "| Steps | 1 |" in card
    assert "| Tokens | 64 |" in card
    assert "| Data | stdlib |" in card
    assert str(in_tmp) not in card
