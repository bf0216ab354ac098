"""Trains a byte-level BPE tokenizer and writes it for ``tokenizers`` and ``transformers``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from titan_core.toolkit.atomic_write import atomic_write
from titan_data.hub import TOKENIZER_FILES, TOKENIZER_JSON

CONFIG = "tokenizer_config.json"
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
PAD = "<|finetune_right_pad_id|>"
SPECIAL_TOKENS = (BEGIN, END, PAD, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
"""Special tokens of every trained tokenizer, with Llama 3's names: documents, padding, and the turns of a chat."""
NUM_BYTES = 256

# Llama 3's and GPT-4's: contractions, words with one leading character, up to three digits, punctuation, line ends, blanks.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LEAST_COUNT = 2
"""A pair of tokens that occurs once in the corpus is not worth a token."""


def train(texts: Iterable[str], num_tokens: int, special_tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with ``num_tokens`` tokens (fewer, if the texts contain too few pairs), followed by
    ``special_tokens``. The result does not depend on the order of the texts or on the number of threads.

    Args:
        num_tokens: number of tokens without the special ones; at least :data:`NUM_BYTES`.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        min_frequency=_LEAST_COUNT,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    begin = tokenizer.token_to_id(BEGIN)
    # As Llama 3's: a prompt begins with the begin token.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN}:1 $B:1", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer`` to ``folder``, replacing the tokenizer in it: ``tokenizer.json``, and the names of its begin, end
    and padding tokens in ``tokenizer_config.json``."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    contents = {CONFIG: json.dumps(config, indent=2) + "\n", TOKENIZER_JSON: tokenizer.to_str(pretty=True)}
    for name in {*TOKENIZER_FILES, "tokenizer.model.json"} - contents.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        with atomic_write(folder / name) as part:
            part.write_text(content, encoding="utf-8")
