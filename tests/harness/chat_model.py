"""A small random Llama with a chat template, as ``transformers`` saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ANSWER = "{{ m['content'] | trim }}<|eot|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}\n\nANSWER{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
).replace("ANSWER", ANSWER)
MARKED = TEMPLATE.replace(
    ANSWER, "{% if m['role'] == 'assistant' %}{% generation %}ANSWER{% endgeneration %}{% else %}ANSWER{% endif %}"
).replace("ANSWER", ANSWER)
"""The same with ``{% generation %}``."""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}] for n in range(24)
] + [
    [
        {"role": "system", "content": "Be kind.\n"},
        {"role": "user", "content": f"Hé {n}"},
        {"role": "assistant", "content": "\nHello 🙂"},
        {"role": "user", "content": " bye "},
        {"role": "assistant", "content": "Bye."},
    ]
    for n in range(8)
]


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Any:
    """Write a tokenizer of bytes with a chat template; return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Line ends that follow one another are one token, which may span a prompt and its completion.
    vocab = {letter: number for number, letter in enumerate([*letters, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|start|>", "<|eot|>"],
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def save_model(folder: Path, **config: Any) -> Any:
    """Write a model and its tokenizer; return the model."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = save_tokenizer(folder)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    described = {
        **sizes, "num_key_value_heads": 2, "vocab_size": 272, "max_position_embeddings": 256, "initializer_range": 0.1,
        **ids, **config,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**described))
    model.generation_config = GenerationConfig(**ids, do_sample=False)
    model.save_pretrained(folder)
    return model


def write_chats(file: Path, chats: list[list[dict[str, Any]]] = CHATS) -> None:
    """Write one record per line."""
    file.write_text("".join(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats), encoding="utf-8")


def finetuning(folder: Path, chats: Path) -> dict[str, object]:
    """Return the settings that train the model in ``folder`` on ``chats``."""
    return {
        "model.from_pretrained": str(folder),
        "model.flavor": "",
        "model.tokenizer": "hf",
        "model.tokenizer_path": str(folder),
        "training.dataset": "chat",
        "training.dataset_path": str(chats),
        "training.seq_len": 128,
        "training.local_batch_size": 2,
        "training.global_batch_size": 4,
        "training.steps": 3,
        "training.max_norm": 0,
        "data.document_mask": "true",
        "lr_scheduler.warmup_steps": 0,
        "metrics.log_freq": 1,
        "job.device": "cpu",
    }
