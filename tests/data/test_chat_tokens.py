"""The ids of a chat are those of transformers, and only what the assistant writes has a loss."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from harness.chat_model import ANSWER, CHATS, MARKED, TEMPLATE, save_tokenizer
from harness.chats import ANSWERED, QUESTION, chat_context, trained
from harness.contexts import tokenizer_at
from titan_core.api import ChatTokenizer, CorruptRecord, ExcludedRecord, UserError
from titan_data import template_process
from titan_data.chat.config import ChatSection
from titan_data.chat.source import ChatReader
from titan_data.template_process import Renderer
from titan_data.tokenizers import chat_template
from titan_data.tokenizers.hugging_face import build


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["by prefixes", "by generation"])
def test_ids_and_mask_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    tokenizer = save_tokenizer(tmp_path, template)
    read = ChatReader(chat_context(tmp_path))
    for chat in CHATS:
        expected = tokenizer.apply_chat_template(
            chat, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        found = read({"messages": chat}, "here")
        # transformers encodes the whole text, in which the end of a prompt may merge with its completion.
        assert tokenizer.decode(found.ids) == tokenizer.decode(expected["input_ids"])
        if not chat[2:]:
            assert found.ids.tolist() == expected["input_ids"]
            assert found.weights.tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["by prefixes", "by generation"])
def test_a_prompt_has_the_ids_that_the_model_is_asked_with(tmp_path: Path, template: str) -> None:
    """The completion begins with a line end, which would merge with those at the end of the prompt."""
    template = template.replace(" | trim", "")
    tokenizer = save_tokenizer(tmp_path, template)
    chat = [QUESTION, {"role": "assistant", "content": "\nb"}]
    found = ChatReader(chat_context(tmp_path))({"messages": chat}, "here")
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found.ids.tolist()[: len(prompt)] == prompt
    assert tokenizer.decode(found.ids[len(prompt) :]) == "\nb<|eot|>" == tokenizer.decode(trained(found))


@pytest.mark.parametrize(("train_on", "expected"), [("all", "Hello 🙂<|eot|>Bye.<|eot|>"), ("last", "Bye.<|eot|>")])
@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["by prefixes", "by generation"])
def test_the_assistant_is_trained_on_with_the_end_of_its_turn(
    tmp_path: Path, train_on: str, expected: str, template: str
) -> None:
    tokenizer = save_tokenizer(tmp_path, template)
    trailing = [*CHATS[-1], {"role": "user", "content": "unanswered"}]
    found = ChatReader(chat_context(tmp_path, train_on=train_on))({"messages": trailing}, "here")
    assert tokenizer.decode(trained(found)) == expected
    assert "unanswered" not in tokenizer.decode(found.ids)


def test_messages_of_the_assistant_can_be_excluded_one_by_one(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    chat = [QUESTION, {**ANSWERED, "weight": 0}, QUESTION, {"role": "assistant", "content": "c"}]
    assert tokenizer.decode(trained(ChatReader(chat_context(tmp_path))({"messages": chat}, "here"))) == "c<|eot|>"


def test_the_tokens_do_not_depend_on_the_day(tmp_path: Path) -> None:
    """Templates of Llama 3 write the date if there is a clock."""
    tokenizer = save_tokenizer(tmp_path, "{{ bos_token }}{{ strftime_now('%d %b %Y') }}" + TEMPLATE)
    found = ChatReader(chat_context(tmp_path))({"messages": [QUESTION, ANSWERED]}, "here")
    assert tokenizer.decode(found.ids).startswith("<|begin|>26 Jul 2024<|begin|>")


@pytest.mark.parametrize("folder", ["byte", "hf"])
def test_pairs_without_a_template_are_documents(tmp_path: Path, folder: str) -> None:
    save_tokenizer(tmp_path / "hf", None)
    made = chat_context(tmp_path / folder, template="none")
    assert made.tokenizer_spec is not None
    tokenizer: Any = made.tokenizer_spec.open()
    found = ChatReader(made)({"prompt": "2 + 2 =\n", "completion": "\n 4"}, "here")
    assert found.ids.tolist()[:1] == tokenizer.begin_ids
    assert trained(found) == [*tokenizer.encode_document("\n 4")[1:-1], *tokenizer.end_ids]
    with pytest.raises(CorruptRecord, match=r"messages, which chat\.template"):
        ChatReader(made)({"messages": [QUESTION, ANSWERED]}, "here")


def test_a_tokenizer_that_begins_texts_with_a_space_encodes_the_chat_as_a_whole(tmp_path: Path) -> None:
    """As Llama 2's does. A completion that is encoded on its own would get another space."""
    fast = save_tokenizer(
        tmp_path, "[{{ messages[0]['content'] }}]{% if messages[1] %} {{ messages[1]['content'] }}</s>{% endif %}"
    )
    vocab = {letter: number for number, letter in enumerate("▁abc[]")}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": fast.chat_template}))
    found = ChatReader(chat_context(tmp_path))({"messages": [QUESTION, ANSWERED]}, "here")
    assert tokenizer.decode(found.ids.tolist(), skip_special_tokens=False) == " [a] b</s>"
    assert [tokenizer.id_to_token(token) for token in trained(found)] == ["▁", "b", "</s>"]


def test_a_template_that_refuses_a_chat_names_the_record(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "{{ raise_exception('no system') if messages[0]['role'] == 'system' }}" + TEMPLATE)
    with pytest.raises(CorruptRecord, match="no system") as error:
        ChatReader(chat_context(tmp_path))({"messages": CHATS[-1]}, "chats.jsonl:7")
    assert error.value.place == "chats.jsonl:7"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # The last message differs from the others, as in templates that remove thoughts.
        (
            TEMPLATE.replace(
                ANSWER, "{{ m['content'][:1] if m['role'] == 'assistant' and not loop.last else m['content'] }}<|eot|>"
            ),
            "differently if others",
        ),
        (TEMPLATE.replace("<|start|>assistant\n\n", "<|start|>assistant\n\n<think>"), "as a continuation of the prompt"),
    ],
    ids=["thoughts", "another prompt"],
)
def test_a_template_without_the_prefix_property_is_refused(tmp_path: Path, template: str, message: str) -> None:
    save_tokenizer(tmp_path, template)
    with pytest.raises(CorruptRecord, match=message):
        ChatReader(chat_context(tmp_path))({"messages": CHATS[-1]}, "here")


def test_a_record_that_is_too_long_is_dropped_cut_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = save_tokenizer(tmp_path)
    record = {"messages": [QUESTION, {"role": "assistant", "content": "b" * 20}]}
    whole = ChatReader(chat_context(tmp_path))(record, "here")
    fitting = chat_context(tmp_path, seq_len=len(whole.ids) - 1)  # the last token is only a target
    assert ChatReader(fitting)(record, "here").ids.tolist() == whole.ids.tolist()
    short = replace(fitting, seq_len=len(whole.ids) - 3)
    with pytest.raises(ExcludedRecord, match=f"its {len(whole.ids)} tokens do not fit"):
        ChatReader(short)(record, "here")
    with pytest.raises(UserError, match=r"here: its .* tokens do not fit .* raise training.seq_len"):
        ChatReader(replace(short, section=ChatSection(too_long="stop")))(record, "here")
    cutting = replace(short, section=ChatSection(too_long="truncate"))
    cut = ChatReader(cutting)(record, "here")
    assert cut.ids.tolist() == whole.ids.tolist()[:-2] and tokenizer.decode(trained(cut)) == "b" * 19
    assert "cut off the end of a record: here: its" in caplog.text
    with pytest.raises(ExcludedRecord, match="nothing of the assistant's message is left"):
        ChatReader(replace(cutting, seq_len=8))(record, "here")


def test_a_template_that_ends_no_turn_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tokenizer(tmp_path, TEMPLATE.replace("<|eot|>", "\n"))
    ChatReader(chat_context(tmp_path))
    assert "the model cannot learn where to stop" in caplog.text


def test_a_mark_without_the_end_of_the_turn_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tokenizer(tmp_path, MARKED)
    ChatReader(chat_context(tmp_path))
    assert not caplog.messages
    save_tokenizer(tmp_path, MARKED.replace("<|eot|>{% endgeneration %}", "{% endgeneration %}<|eot|>"))
    ChatReader(chat_context(tmp_path))
    assert [message.partition(", so")[0] for message in caplog.messages] == [
        "the chat template marks a message of the assistant without the token that ends it, '<|eot|>'"
    ]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["by prefixes", "by generation"])
def test_the_prefixes_of_a_chat_are_rendered_by_one_request(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(tmp_path, template)
    context, requests = chat_context(tmp_path), 0
    read, ask = ChatReader(context), Renderer.ask

    def counted(*arguments: Any) -> Any:
        nonlocal requests
        requests += 1
        return ask(*arguments)

    monkeypatch.setattr(Renderer, "ask", counted)
    read({"messages": CHATS[-1]}, "here")
    assert requests == 1
    assert context.tokenizer_spec is not None
    tokenizer = context.tokenizer_spec.open()
    assert isinstance(tokenizer, ChatTokenizer)
    prefixes = [(2, True), (3, False), (4, True), (5, False)]
    chat, together = tokenizer.render_prefixes(CHATS[-1], prefixes)
    texts = list(together)
    assert (chat, texts) == ChatTokenizer.render_prefixes(tokenizer, CHATS[-1], prefixes)
    assert len(texts) == (0 if template is MARKED else 4)


ENDED = TEMPLATE + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"


def long_chat(messages: int, characters: int) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": f"{n}é" + "a" * characters} for n in range(messages)]


@pytest.mark.parametrize("messages", [400, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.parametrize("template", [TEMPLATE, ENDED], ids=["a prefix", "and its end"])
def test_prefixes_of_a_long_chat_are_those_of_transformers(tmp_path: Path, template: str, messages: int) -> None:
    """Together they take the square of its memory: 320 MB and 10 GB."""
    fast, chat = save_tokenizer(tmp_path, template), long_chat(messages, 4 * 10**3)
    tokenizer = build(tokenizer_at(tmp_path))
    prefixes = [(number, number % 2 == 1) for number in range(1, messages + 1)]
    tracemalloc.start()
    whole, texts = tokenizer.render_prefixes(chat, prefixes)
    for (number, prompt), text in zip(prefixes, texts, strict=True):
        if number % (messages // 8) < 2:
            asked = {"tokenize": False, "add_generation_prompt": prompt}
            assert text == fast.apply_chat_template(chat[:number], **asked)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert whole.text == fast.apply_chat_template(chat, tokenize=False)
    assert peak < 20 * len(whole.text)


@pytest.mark.full
def test_a_long_chat_is_tokenised_as_by_transformers(tmp_path: Path) -> None:
    fast, chat = save_tokenizer(tmp_path, TEMPLATE), long_chat(1200, 10**3)
    expected = fast.apply_chat_template(chat, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True)
    found = ChatReader(chat_context(tmp_path, seq_len=2**22))({"messages": chat}, "here")
    assert found.ids.tolist() == expected["input_ids"]
    assert found.weights.tolist() == expected["assistant_masks"]


SLOW = "{% for n in range(99999) %}{% endfor %}" + TEMPLATE


def test_prefixes_that_take_too_long_for_an_answer_take_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, requests = Renderer(cpu_seconds=0.1), []
    ask = quick.ask
    monkeypatch.setattr(quick, "ask", lambda *request: requests.append(request) or ask(*request))
    monkeypatch.setattr(template_process, "renderer", quick)
    fast, chat = save_tokenizer(tmp_path, SLOW), long_chat(40, 3)
    tokenizer = build(tokenizer_at(tmp_path))
    prefixes = [(number, False) for number in range(1, 41)]
    found = list(tokenizer.render_prefixes(chat, prefixes)[1])
    assert found == [fast.apply_chat_template(chat[:number], tokenize=False) for number, _ in prefixes]
    assert len(requests) > 2  # the first reads the template
    monkeypatch.setattr(chat_template, "_MOST_ANSWERS", 1)
    with pytest.raises(
        UserError, match=r"chats.jsonl:7: .* it takes too long to render the beginnings of a chat of 40 messages"
    ):
        ChatReader(chat_context(tmp_path, seq_len=2**20))({"messages": chat}, "chats.jsonl:7")
    quick.end()
