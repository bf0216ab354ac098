"""The files of a tokenizer define the tokens that mark documents, in a fixed order of precedence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from harness.contexts import tokenizer_at
from titan_core.api import UserError
from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_data.tokenizers.hugging_face import HuggingFaceTokenizer, build as build_hf

SPECIAL = ("<s>", "</s>", "[CLS]", "[SEP]", "<|endoftext|>", "<begin>", "<end>", "<more>")
ID = {name: number for number, name in enumerate(SPECIAL)}


def template(single: str) -> Any:
    tokens = [(name, ID[name]) for name in SPECIAL]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=tokens)


POST: dict[str, Any] = {
    "none": None,
    "bytes": processors.ByteLevel(),
    "begin": template("<begin> $A"),
    "both": template("<begin> $A <end>"),
    "several": template("<begin> <more> $A <end> <more>"),
    "bert": processors.BertProcessing(("[SEP]", ID["[SEP]"]), ("[CLS]", ID["[CLS]"])),
    "roberta": processors.RobertaProcessing(("</s>", ID["</s>"]), ("<s>", ID["<s>"])),
    "sequence": processors.Sequence([processors.ByteLevel(), template("<begin> $A <end>")]),
}


def made(
    folder: Path,
    post: str = "none",
    config: object = None,
    special: object = None,
    without: tuple[str, ...] = (),
    before_saving: Any = lambda tokenizer: None,
) -> HuggingFaceTokenizer:
    words = {name: number for name, number in ID.items() if name not in without} | {"a": 20, "b": 21, "c": 22}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([name for name in SPECIAL if name not in without])
    if POST[post] is not None:
        tokenizer.post_processor = POST[post]
    before_saving(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, contents in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        if contents is not None:
            (folder / name).write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return build_hf(tokenizer_at(folder))


CONFIG = {"bos_token": "<begin>", "eos_token": "<end>"}
DECODER: dict[str, Any] = {"added_tokens_decoder": {}}
CASES: dict[str, tuple[dict[str, Any], list[str], list[str], str]] = {
    # files -> begin, end, and a part of the description
    "config": ({"config": CONFIG}, ["<begin>"], ["<end>"], "'<begin>' (5): tokenizer_config.json"),
    "tokens written out": (
        {"config": {"bos_token": {"__type": "AddedToken", "content": "<begin>"}, "eos_token": {"content": "<end>"}}},
        ["<begin>"], ["<end>"], "'<end>' (6): tokenizer_config.json",
    ),
    "map": ({"special": CONFIG}, ["<begin>"], ["<end>"], "special_tokens_map.json"),
    "config before map": (
        {"config": CONFIG | DECODER, "special": {"bos_token": "<s>", "eos_token": "</s>"}},
        ["<begin>"], ["<end>"], "tokenizer_config.json (but special_tokens_map.json says token 0)",
    ),
    "map before config of an older version": (
        {"config": CONFIG, "special": {"bos_token": "<s>", "eos_token": "</s>"}},
        ["<s>"], ["</s>"], "special_tokens_map.json (but tokenizer_config.json says token 5)",
    ),
    "a map that is not read": ({"config": DECODER, "special": CONFIG}, ["<s>"], ["<|endoftext|>"], "chosen by name"),
    "another id": (
        {"config": CONFIG | {"added_tokens_decoder": {"7": {"content": "<begin>"}}}},
        ["<begin>"], ["<end>"], "tokenizer_config.json (but added_tokens_decoder gives it the id 7)",
    ),
    "each names one": ({"config": {"bos_token": "<begin>"}, "special": {"eos_token": "<end>"}}, ["<begin>"], ["<end>"], ""),
    "template": ({"post": "both"}, ["<begin>"], ["<end>"], "the post-processor of tokenizer.json"),
    "sequence of processors": ({"post": "sequence"}, ["<begin>"], ["<end>"], "the post-processor"),
    "bert": ({"post": "bert"}, ["[CLS]"], ["[SEP]"], "the post-processor"),
    "roberta": ({"post": "roberta"}, ["<s>"], ["</s>"], "the post-processor"),
    "several": ({"post": "several"}, ["<begin>", "<more>"], ["<end>", "<more>"], "the post-processor"),
    "more than the named": (
        {"post": "several", "config": CONFIG},
        ["<begin>", "<more>"], ["<end>", "<more>"], "tokenizer_config.json, and the post-processor",
    ),
    "config before template": (
        {"post": "both", "config": {"bos_token": "<s>", "eos_token": "</s>"}},
        ["<s>"], ["</s>"], "tokenizer_config.json (but the post-processor of tokenizer.json adds token 5)",
    ),
    "Llama 3: an end is named": ({"post": "begin", "config": CONFIG}, ["<begin>"], ["<end>"], "tokenizer_config.json"),
    "Qwen: no begin": (
        {"post": "bytes", "config": {"bos_token": None, "eos_token": "<|endoftext|>", "add_bos_token": False}},
        [], ["<|endoftext|>"], "no token: add_bos_token in tokenizer_config.json",
    ),
    "explicitly none": ({"config": {"bos_token": None, "eos_token": None}}, [], [], "no token: tokenizer_config.json"),
    "null, and a map": ({"config": {"bos_token": None}, "special": CONFIG}, ["<begin>"], ["<end>"], "special_tokens_map"),
    "GPT-2: one token for both": (
        {"post": "bytes", "config": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}},
        [], ["<|endoftext|>"], "no token: tokenizer_config.json: the same token ends documents",
    ),
    "one token for both, and added": (
        {"config": {"bos_token": "<s>", "eos_token": "<s>", "add_bos_token": True}},
        ["<s>"], ["<s>"], "tokenizer_config.json",
    ),
    "added in spite of add_bos_token": (
        {"post": "begin", "config": CONFIG | {"add_bos_token": False}},
        ["<begin>"], ["<end>"], "'<begin>' (5): tokenizer_config.json",
    ),
    "neither added nor wanted": (
        {"config": CONFIG | {"add_bos_token": False}}, [], ["<end>"], "no token: add_bos_token in tokenizer_config.json",
    ),
    "ends of prompts": ({"config": CONFIG | {"add_eos_token": False}}, ["<begin>"], ["<end>"], "tokenizer_config.json"),
    "names": ({}, ["<s>"], ["<|endoftext|>"], "chosen by name, because no file defines it"),
    "a config without tokens": ({"config": {"model_max_length": 5}}, ["<s>"], ["<|endoftext|>"], "chosen by name"),
    "no token": ({"without": ("<s>", "</s>", "[CLS]", "[SEP]", "<|endoftext|>")}, [], [], "no token: no file defines one"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_files_define_the_marks(tmp_path: Path, case: str) -> None:
    files, begin, end, description = CASES[case]
    tokenizer = made(tmp_path, **files)
    assert tokenizer.begin_ids == [ID[name] for name in begin]
    assert tokenizer.end_ids == [ID[name] for name in end]
    assert tokenizer.encode_document("b c") == [*tokenizer.begin_ids, 21, 22, *tokenizer.end_ids]
    assert tokenizer.encode_document("") == [*tokenizer.begin_ids, *tokenizer.end_ids]
    lines = tokenizer.describe_special_tokens()
    assert [line.split()[:2] for line in lines] == [["documents", "begin"], ["documents", "end"]]
    assert description in "\n".join(lines)


def test_tokens_that_the_vocabulary_lacks_follow_it(tmp_path: Path) -> None:
    """As in the folder of TorchTitan's own tests: the ids in ``added_tokens_decoder`` are not those that they get."""
    named = {"128000": {"content": "<|bos|>", "special": True}, "128001": {"content": "<|eos|>", "special": True}}
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "added_tokens_decoder": named}
    tokenizer = made(tmp_path, config=config)
    assert tokenizer.encode_document("b c") == [11, 21, 22, 12]  # the vocabulary has 11 tokens
    assert tokenizer.encode_with_special_tokens("b <|eos|>") == [21, 12]
    assert tokenizer.vocab_size == 23
    assert "'<|eos|>' (12): tokenizer_config.json (but tokenizer.json lacks it)" in tokenizer.describe_special_tokens()[1]


def test_a_number_for_a_token_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<x>": "5"}')
    with pytest.raises(UserError, match=r'added_tokens\.json: <x> is "5", not an id'):
        build_hf(tokenizer_at(tmp_path))


def test_only_a_file_named_tokenizer_json_uses_the_config_of_its_folder(tmp_path: Path) -> None:
    made(tmp_path, config=CONFIG)
    assert build_hf(tokenizer_at(tmp_path / "tokenizer.json")).begin_ids == [ID["<begin>"]]
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    assert build_hf(tokenizer_at(tmp_path / "other.json")).begin_ids == [ID["<s>"]]


BROKEN: dict[str, tuple[object, str]] = {
    "no JSON": ("{", "is not JSON: "),
    "empty": ("", "is not JSON: "),
    "nested": ("[" * 100_000, "cannot be used: "),
    "list": ([1], "contains an array, not an object"),
    "null": ("null", "contains null, not an object"),
    "number": ({"bos_token": 5}, "bos_token is 5, not a token"),
    "flag": ({"eos_token": True}, "eos_token is true, not a token"),
    "tokens": ({"eos_token": ["</s>"]}, r'eos_token is \["</s>"\], not a token'),
    "no content": ({"eos_token": {"lstrip": False}}, r'eos_token is \{"lstrip": false\}, not a token'),
    "unknown flag": ({"eos_token": {"content": "</s>", "strips": True}}, "eos_token is .*, not a token with known flags"),
    "further tokens": ({"extra_special_tokens": "<x>"}, 'extra_special_tokens is "<x>", not a list of tokens'),
}
BROKEN_CONFIG: dict[str, tuple[object, str]] = {
    "no flag": ({"add_bos_token": "no"}, 'add_bos_token is "no", not true or false'),
    "no id": (CONFIG | {"added_tokens_decoder": {"x": {"content": "<x>"}}}, "added_tokens_decoder is .*, not an id"),
    "no content there": (CONFIG | {"added_tokens_decoder": {"7": {}}}, r"added_tokens_decoder\[7\] is \{\}, not a token"),
    "no object there": (CONFIG | {"added_tokens_decoder": {"7": "<x>"}}, "added_tokens_decoder is .*, not an id"),
    "versions": ({"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}, "fast_tokenizer_files names a file for each version"),
    "no other flag": ({"split_special_tokens": 1}, "split_special_tokens is 1, not true or false"),
    "no decoder": (CONFIG | {"added_tokens_decoder": [1]}, r"added_tokens_decoder is \[1\], not an object"),
}


@pytest.mark.parametrize("case", [*BROKEN, *BROKEN_CONFIG])
def test_a_damaged_config_is_one_clear_error(tmp_path: Path, case: str) -> None:
    contents, why = (BROKEN | BROKEN_CONFIG)[case]
    with pytest.raises(UserError, match=rf"tokenizer_config\.json: {why}"):
        made(tmp_path, config=contents)
    if case in BROKEN:
        (tmp_path / "tokenizer_config.json").unlink()
        with pytest.raises(UserError, match=rf"special_tokens_map\.json: {why}"):
            made(tmp_path, special=contents)


def test_a_config_that_is_not_text_is_one_clear_error(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"bos_token": "\xff"}')
    with pytest.raises(UserError, match=r"tokenizer_config\.json: is not JSON"):
        build_hf(tokenizer_at(tmp_path))


def test_saved_truncation_and_padding_do_not_apply_to_documents(tmp_path: Path) -> None:
    """Truncation would drop the rest of each document."""

    def limit(tokenizer: Tokenizer) -> None:
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=16)

    tokenizer = made(tmp_path, config=CONFIG, before_saving=limit)
    assert tokenizer.encode_document("b c " * 10) == [ID["<begin>"], *[21, 22] * 10, ID["<end>"]]
    assert tokenizer.encode_document("b") == [ID["<begin>"], 21, ID["<end>"]]


def test_the_byte_tokenizer_has_its_own_marks() -> None:
    byte = ByteTokenizer()
    assert (byte.begin_ids, byte.end_ids) == ([256], [257])


def test_a_vocabulary_that_does_not_cover_every_text_is_accepted(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "0": 1}))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="$A $B", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert (
        build_hf(tokenizer_at(tmp_path)).describe_special_tokens()[0]
        == "documents begin with '<s>' (0): the post-processor of tokenizer.json"
    )
