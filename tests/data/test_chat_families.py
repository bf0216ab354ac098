"""What has a loss in chats of thirteen families, whose templates do not mark it: the assistant's text and the token that
ends its turn, and nothing that follows, such as a line end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harness.chats import chat_context, trained
from titan_core.api import CorruptRecord
from titan_data.chat.source import ChatReader


class Family(NamedTuple):
    """The structure of a family's chats. ``ANSWER`` stands for a message of the assistant with the token that ends it, and
    the tokens that the assistant writes before it."""

    template: str
    special: str
    ending: str
    end_of_text: str = "<eos>"
    opening: str = ""


FAMILIES = {
    "ChatML, Qwen": Family(
        "{% for m in messages %}<|im_start|>{{ m.role }}\nANSWER{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_start|> <|im_end|>", "<|im_end|>",
    ),
    "Llama 3": Family(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\nANSWER{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|start_header_id|> <|end_header_id|> <|eot_id|>", "<|eot_id|>",
    ),
    "Mistral": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}ANSWER{% endif %}{% endfor %}",
        "[INST] [/INST] </s>", "</s>", "</s>",
    ),
    "Gemma": Family(
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "ANSWER{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<start_of_turn> <end_of_turn>", "<end_of_turn>",
    ),
    "Phi-3": Family(  # a chat ends with the token that ends texts
        "{% for m in messages %}<|{{ m.role }}|>\nANSWER{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        "<|user|> <|assistant|> <|end|>", "<|end|>", "<|endoftext|>",
    ),
    "Zephyr": Family(
        "{% for m in messages %}<|{{ m.role }}|>\nANSWER{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "</s>", "</s>", "</s>",
    ),
    "Vicuna": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %} USER: {{ m.content }} ASSISTANT:{% else %}ANSWER"
        "{% endif %}{% endfor %}",
        "</s>", "</s>", "</s>",
    ),
    "OLMo, Tulu": Family(  # a line end separates turns, and does not end a chat
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + '\n' }}"
        "{% else %}{{ '<|assistant|>\n' }}ANSWER{{ '\n' if not loop.last }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        "", "<eos>",
    ),
    "DeepSeek": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% else %}<｜Assistant｜>ANSWER{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
        "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    ),
    "Granite": Family(
        "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>ANSWER{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        "<|start_of_role|> <|end_of_role|> <|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>",
    ),
    "Phi-4 mini": Family(
        "{% for m in messages %}<|{{ m.role }}|>ANSWER{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}",
        "<|user|> <|assistant|> <|end|>", "<|end|>", "<|endoftext|>",
    ),
    "Command A": Family(
        "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'user' %}"
        "<|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% else %}<|CHATBOT_TOKEN|>ANSWER{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
        "<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|>",
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|>",
    ),
    "gpt-oss": Family(  # the assistant writes the channel of its message
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'user' %}<|message|>{{ m.content }}<|end|>"
        "{% else %}ANSWER{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|start|> <|channel|> <|message|> <|end|> <|return|>", "<|return|>", "<|return|>", "<|channel|>final<|message|>",
    ),
}  # fmt: skip
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2\n"},
    {"role": "user", "content": "And 2 + 2?\n\n"},
    {"role": "assistant", "content": "That is 4."},
]


def tokenizer_of(family: Family, folder: Path) -> Any:
    """Write a tokenizer of bytes with the family's special tokens and its template; return it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate([*letters, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    more = [token for token in family.special.split() if token != family.end_of_text]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token=family.end_of_text, additional_special_tokens=more
    )
    fast.chat_template = family.template.replace("ANSWER", family.opening + "{{ m.content }}" + family.ending)
    fast.save_pretrained(folder)
    return fast


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("train_on", ["all", "last"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_answer_and_the_end_of_its_turn_have_a_loss(name: str, train_on: str, tmp_path: Path) -> None:
    """The same ids and mask as in transformers with the family's template, to which marks of the answers are added."""
    family = FAMILIES[name]
    fast = tokenizer_of(family, tmp_path)
    found = ChatReader(chat_context(tmp_path, train_on=train_on))({"messages": CHAT}, "here")
    answer = family.opening + "{{ m.content }}" + family.ending
    marked = (
        f"{{% if m.role == 'assistant' %}}{{% generation %}}{answer}{{% endgeneration %}}{{% else %}}{answer}{{% endif %}}"
    )
    expected = fast.apply_chat_template(
        CHAT, chat_template=family.template.replace("ANSWER", marked), return_dict=True, return_assistant_tokens_mask=True
    )
    assert found.ids.tolist() == expected["input_ids"]
    answers = [family.opening + message["content"] + family.ending for message in CHAT if message["role"] == "assistant"]
    assert fast.decode(trained(found)) == "".join(answers if train_on == "all" else answers[-1:])
    if train_on == "all":
        assert found.weights.tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_is_asked_with_what_it_was_trained_on(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    fast = tokenizer_of(family, tmp_path)
    found = ChatReader(chat_context(tmp_path, train_on="last"))({"messages": CHAT}, "here")
    prompt = fast.apply_chat_template(CHAT[:3], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found.ids.tolist()[: len(prompt)] == prompt
    assert not found.weights[: len(prompt)].any()
    assert found.weights[len(prompt)] == 1


def test_the_last_turn_may_end_otherwise_than_those_before_it(tmp_path: Path) -> None:
    """As in the template of gpt-oss, whose earlier turns end with ``<|end|>``."""
    family = FAMILIES["gpt-oss"]
    ending = "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    fast = tokenizer_of(family._replace(ending=ending), tmp_path)
    found = ChatReader(chat_context(tmp_path, train_on="last"))({"messages": CHAT}, "here")
    prompt = (
        "<|start|>user<|message|>1 + 1?<|end|><|start|>assistant<|channel|>final<|message|>2\n<|end|>"
        "<|start|>user<|message|>And 2 + 2?\n\n<|end|><|start|>assistant"
    )
    assert fast.decode(found.ids) == prompt + "<|channel|>final<|message|>That is 4.<|return|>"
    assert fast.decode(trained(found)) == "<|channel|>final<|message|>That is 4.<|return|>"
    with pytest.raises(CorruptRecord, match="renders message 2 differently if others follow") as error:
        ChatReader(chat_context(tmp_path))({"messages": CHAT}, "here")
    assert 'chat.train_on = "last"' in error.value.fix
