"""A recipe that trains a given model on chats, as a start for a recipe of one's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from titan_core.api import CommandContext, UserError
from titan_core.toolkit.text import show

SEQUENCE: Final = 4096
"""Length of the sequences, if the model's context is as long."""

# Rate, warm-up of 3 %, linear decay, no weight decay and sequences of 4096 tokens are those of Tülu 3 8B (arXiv 2411.15124;
# scripts/train/finetune/tulu_finetune_mix.sh of allenai/open-instruct), which takes 128 sequences a step.
_TEMPLATE: Final = """\
[model]
# Its architecture, size, context and tokenizer come from its files.
from_pretrained = {name}

[training]
dataset = "chat"
# JSON lines such as {{"messages": [{{"role": "user", "content": "2 + 2?"}}, {{"role": "assistant", "content": "4"}}]}}
dataset_path = "chats.jsonl"
seq_len = {length}
local_batch_size = 1
# Chats are repeated until then: `titan data inspect` shows how many of them share a sequence.
steps = 100

[data]
document_mask = true

[optimizer]
name = "AdamW"
lr = 5e-6
weight_decay = 0.0

[lr_scheduler]
warmup_steps = 3

[activation_checkpoint]
mode = "selective"

[checkpoint]
enable = true

[metrics]
log_freq = 1
"""


def default_file(name: str) -> Path:
    """Return the file for a recipe of the model ``name``."""
    return Path(f"{re.sub(r'[^A-Za-z0-9_.-]', '-', Path(name).expanduser().resolve().name) or 'model'}.toml")


def model_recipe(name: str, context: CommandContext) -> str:
    """Return the TOML of a recipe that trains the model ``name`` on chats.

    Args:
        name: a folder of weights, or the name of a downloaded model.

    Raises:
        UserError: there is no such model, no installed plugin trains it, or it has no tokenizer.
    """
    stored = context.models.find(name)
    if "tokenizer" not in stored.sections["model"]:
        why = "its files contain no tokenizer that Titan finds"
        raise UserError.one(stored.path, why, "put the tokenizer.json of the model beside its weights")
    longest = context.models.job(stored).model.layout.max_seq_len
    return _TEMPLATE.format(name=show(name), length=min(SEQUENCE, longest))
