"""Dataset ``chat``: chats and pairs of prompt and completion, from local files or the hub."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from titan_core.api import (
    ChatTokenizer,
    CorruptRecord,
    DatasetContext,
    DocumentSource,
    ExcludedRecord,
    Problem,
    UserError,
    WeightedTokens,
)
from titan_core.api.data.tokenizer import Message
from titan_data.chat.config import ChatSection
from titan_data.chat.forms import FIELDS, form_of_record, known_fields
from titan_data.chat.records import CALLS, Chat, chat_of, fields_of
from titan_data.chat.tokens import DATE, plain_tokens, templated_tokens
from titan_data.local_files import check_first, form_of
from titan_data.records import check_format, converted, format_fields
from titan_data.storage import problems
from titan_data.template_process import TemplateStopped

log = logging.getLogger(__name__)

_FORMS = ("json", "parquet", "arrow", "csv")
_MOST_LOGGED = 20
_TEMPLATE_FIX = (
    "use the tokenizer of an instruction-tuned model, write a chat_template.jinja beside tokenizer.json, or, for prompts "
    'and completions, set chat.template = "none"'
)


class ChatReader:
    """Converts records to documents. Only what the assistant writes has a loss."""

    def __init__(self, context: DatasetContext[ChatSection]) -> None:
        """
        Raises:
            UserError: the tokenizer has no chat template, although one is needed.
        """
        assert context.tokenizer_spec is not None
        assert context.seq_len is not None
        self._context, self._section = context, context.section
        self._tokenizer = context.tokenizer_spec.open()
        self._longest = context.seq_len + 1  # the last token is only a target
        self._cut = 0
        if self._section.template == "tokenizer":
            _require_template(self._tokenizer, context)

    def __call__(self, record: Any, place: str) -> WeightedTokens:
        """Return the tokens of ``record``.

        Raises:
            CorruptRecord: it contains no chat.
            ExcludedRecord: it does not fit into a sequence.
            UserError: the template takes too long, or too much memory.
        """
        chat = chat_of(converted(record, self._context, place), self._section, place)
        if self._section.template == "tokenizer":
            assert isinstance(self._tokenizer, ChatTokenizer)
            try:
                require_rendered_tools(chat, self._tokenizer, place)
                document = templated_tokens(chat, self._tokenizer, place)
            except TemplateStopped as error:
                problem = error.problems[0]
                raise UserError.one(place, f"{problem.where}: {problem.why}", problem.fix) from None
        elif chat.texts is not None:
            document = plain_tokens(*chat.texts, self._tokenizer, place)
        else:
            why = 'has messages, which chat.template = "none" does not render'
            raise CorruptRecord(place, why, 'set chat.template = "tokenizer"')
        return document if len(document.ids) <= self._longest else self._shortened(document, place)

    def _shortened(self, document: WeightedTokens, place: str) -> WeightedTokens:
        why = f"its {len(document.ids)} tokens do not fit into a sequence of {self._longest - 1}"
        if self._section.too_long == "stop":
            fix = 'raise training.seq_len, or set chat.too_long to "drop" or "truncate"'
            raise UserError.one(place, why, fix)
        if self._section.too_long == "drop":
            raise ExcludedRecord(place, why)
        weights = document.weights[: self._longest]
        if not weights[1:].any():
            raise ExcludedRecord(place, f"{why}, and nothing of the assistant's message is left after cutting off the end")
        self._cut += 1
        if self._cut <= _MOST_LOGGED:
            # An error, because ranks other than the first, which read other records, log only errors.
            log.error("cut off the end of a record: %s: %s", place, why)
        if self._cut == _MOST_LOGGED:
            log.error("further records that are cut are not logged")
        return replace(document, ids=document.ids[: self._longest], weights=weights)


def open_chats(context: DatasetContext[ChatSection]) -> DocumentSource:
    """Open the dataset: local files, or a dataset on the hub if no such file exists.

    Raises:
        UserError: it cannot be opened, or the tokenizer has no chat template.
    """
    from titan_data.csv_files import open_csv_files
    from titan_data.huggingface import stream_hub
    from titan_data.record_files import open_files
    from titan_data.table_columns import Columns

    read = ChatReader(context)
    form = form_of(context, _FORMS, f"with the fields {FIELDS}")
    if form == "csv":
        return open_csv_files(context, read)
    if form is None:
        return stream_hub(context, read)
    known = Columns(others=known_fields(context.section))
    columns = known if context.format is None else Columns(others=None, named=format_fields(context.format))
    return open_files(context, form, read, columns)


def check_chats(context: DatasetContext[ChatSection]) -> list[Problem]:
    """Check the files, the tokenizer's template, and the first record of JSON lines."""

    def check() -> list[Problem]:
        form = form_of(context, _FORMS, f"with the fields {FIELDS}")
        found = check_format(context)
        if not found and context.tokenizer_spec is not None:
            check_first(context, form, ChatReader(context))
        return found

    return problems(context, check)


def describe_chats(context: DatasetContext[ChatSection]) -> list[str]:
    """Return which fields of the first record are read.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    from titan_data.record_files import first_row

    form = form_of(context, _FORMS, f"with the fields {FIELDS}")
    first = None if form is None else first_row(context, form)
    if first is None:
        return ["the fields of each record are detected when it is read"]
    record, place = first
    try:
        fields = fields_of(converted(record, context, place), place)
        return form_of_record(fields, context.section, place).describe(fields)
    except CorruptRecord as error:
        return [f"{error.place}: {error.why}"]


def _require_template(tokenizer: Any, context: DatasetContext[ChatSection]) -> None:
    """
    Raises:
        UserError: the tokenizer has no chat template.
    """
    if not isinstance(tokenizer, ChatTokenizer):
        raise UserError.one(f"dataset {context.name!r}", "the job's tokenizer has no chat template", _TEMPLATE_FIX)
    try:
        tokenizer.require_chat_template()
    except UserError as error:
        problem = error.problems[0]
        raise UserError.one(f"dataset {context.name!r}", f"{problem.where} {problem.why}", _TEMPLATE_FIX) from None
    ending = tokenizer.decode(list(tokenizer.turn_end_ids))
    if not ending:
        log.warning(
            "the chat template writes no special token after a message of the assistant, so the model cannot learn where to "
            "stop: write {{ eos_token }} there"
        )
        return
    chat = tokenizer.render_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], False)
    if chat.assistant and ending not in chat.text[slice(*chat.assistant[-1])]:
        log.warning(
            "the chat template marks a message of the assistant without the token that ends it, %r, so the model cannot "
            "learn where to stop: write {%% endgeneration %%} behind that token",
            ending,
        )


_FIX = "use a tokenizer whose chat template renders tools, or remove the record"


def require_rendered_tools(chat: Chat, tokenizer: ChatTokenizer, place: str) -> None:
    """Check that the text of ``chat`` depends on its tools, on each message that calls some, and on each answer of a tool.

    Args:
        place: where the chat comes from, for errors.

    Raises:
        CorruptRecord: the template leaves one of them out.
    """
    calls = [number for number, message in enumerate(chat.messages) if message.get(CALLS)]
    answers = [number for number, message in enumerate(chat.messages) if message["role"] == "tool"]
    if not (calls or answers or chat.tools):
        return
    whole = _rendered(chat.messages, chat.tools, tokenizer)
    if whole is None:
        return  # the template refuses the chat, and rendering it says why
    if chat.tools and _rendered(chat.messages, None, tokenizer) == whole:
        raise CorruptRecord(place, "has tools, which the chat template does not render", _FIX)
    for number in calls:
        without = {key: value for key, value in chat.messages[number].items() if key != CALLS}
        if _rendered([*chat.messages[:number], without, *chat.messages[number + 1 :]], chat.tools, tokenizer) == whole:
            why = f"message {number + 1} calls tools, and the chat template does not render {CALLS}"
            raise CorruptRecord(place, why, _FIX)
    for number in answers:
        if _rendered([*chat.messages[:number], *chat.messages[number + 1 :]], chat.tools, tokenizer) == whole:
            why = f"message {number + 1} is the answer of a tool, which the chat template does not render"
            raise CorruptRecord(place, why, _FIX)


def _rendered(messages: Sequence[Message], tools: Sequence[Any] | None, tokenizer: ChatTokenizer) -> str | None:
    try:
        return tokenizer.render_chat(messages, False, tools, DATE).text
    except TemplateStopped:
        raise
    except UserError:
        return None
