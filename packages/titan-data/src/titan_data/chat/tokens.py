"""Chats to token ids, with a weight for each: 1 for what the assistant writes, including the token that ends its turn, and 0
for all else."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from typing import Any

import numpy

from titan_core.api import ChatTokenizer, CorruptRecord, TextTokenizer, UserError, WeightedTokens
from titan_data.chat.records import Chat
from titan_data.template_process import TemplateStopped

Range = tuple[int, int]

DATE = datetime.date(2024, 7, 26)
"""What templates write as the date, on which the tokens of a run must not depend. It is the one that Llama 3's writes where
there is no clock."""

_PREFIX_FIX = 'set chat.train_on = "last", or use a template that marks the assistant\'s part with {% generation %}'


def templated_tokens(chat: Chat, tokenizer: ChatTokenizer, place: str) -> WeightedTokens:
    """Return the tokens of ``chat``, rendered by the tokenizer's template.

    A prompt has the ids that it has when the model is asked to continue it.

    Args:
        place: where the chat comes from, for errors.

    Raises:
        CorruptRecord: the template refuses the chat, or does not show which part of it the assistant writes.
        TemplateStopped: the template takes too long, or too much memory.
    """
    try:
        text, ranges = _assistant_ranges(chat, tokenizer, place)
    except TemplateStopped:
        raise
    except UserError as error:
        problem = error.problems[0]
        raise CorruptRecord(place, f"{problem.where}: {problem.why}", problem.fix or "fix the record") from None
    encode = tokenizer.encode_with_special_tokens
    cuts = [cut for both in ranges for cut in both]
    whole = encode(text)
    pieces = [encode(text[start:end]) for start, end in pairwise([0, *cuts, len(text)])]
    if _joined(pieces) != whole:  # some tokenizers begin each text with a space
        prefixes = takewhile(lambda ids: whole[: len(ids)] == ids, (encode(text[:cut]) for cut in cuts))
        at = list(map(len, prefixes))
        if len(at) == len(cuts):
            pieces = [whole[start:end] for start, end in pairwise([0, *at, len(whole)])]
    return _weighted(pieces, whole, tokenizer, place)


def plain_tokens(prompt: str, completion: str, tokenizer: TextTokenizer, place: str) -> WeightedTokens:
    """Return the tokens of ``prompt`` and ``completion``, one after the other, as one document.

    Args:
        place: where the record comes from, for errors.

    Raises:
        CorruptRecord: the tokens do not show where the completion begins.
    """
    begin, end = _num_marks(tokenizer)
    whole = list(map(int, tokenizer.encode_document(prompt + completion)))
    alone = [list(map(int, tokenizer.encode_document(text))) for text in (prompt, completion)]
    asked = alone[0][: len(alone[0]) - end]
    return _weighted([asked, alone[1][begin:]], whole, tokenizer, place)


def _num_marks(tokenizer: TextTokenizer) -> tuple[int, int]:
    """Return the number of tokens that mark the begin and the end of a document.

    Raises:
        UserError: they cannot be told apart.
    """
    marks = tokenizer.marks()
    if marks is None:
        why = "it puts tokens around a document, and it is unclear which of them begin it"
        raise UserError.one("model.tokenizer", why, "use a tokenizer that says so (TextTokenizer.marks)")
    return len(marks[0]), len(marks[1])


def _assistant_ranges(chat: Chat, tokenizer: ChatTokenizer, place: str) -> tuple[str, list[Range]]:
    """Return the text of ``chat``, and the ranges of the messages to train on.

    A template without ``{% generation %}`` shows them if the text of a chat begins with the text of its first messages. Each
    then ends with the token that ends the turn.
    """
    messages = chat.messages
    asked = [end for index in chat.trained for end in ((index, True), (index + 1, False))]
    full, prefixes = tokenizer.render_prefixes(messages, asked, chat.tools, DATE)
    if full.assistant is not None:
        written = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(written) != len(full.assistant):
            why = f"the chat template marks {len(full.assistant)} messages of the assistant, but there are {len(written)}"
            raise CorruptRecord(place, why, "fix the template")
        by_index = dict(zip(written, full.assistant, strict=True))
        return full.text, [by_index[index] for index in chat.trained]
    ending = tokenizer.decode(list(tokenizer.turn_end_ids))
    ranges = []
    texts = iter(prefixes)
    for index, before, after in zip(chat.trained, texts, texts, strict=True):
        if not after.startswith(before):
            why = f"the chat template does not render message {index + 1} as a continuation of the prompt for it"
            raise CorruptRecord(place, why, "use a template that marks the assistant's part with {% generation %}")
        if ending and (end := after.rfind(ending, len(before))) >= 0:
            after = after[: end + len(ending)]  # not what separates it from the next turn, or ends the chat
        if not full.text.startswith(after):
            why = f"the chat template renders message {index + 1} differently if others follow"
            raise CorruptRecord(place, why, _PREFIX_FIX)
        ranges.append((len(before), len(after)))
    return full.text, ranges


def _joined(pieces: Iterable[Sequence[int]]) -> list[int]:
    return [token for piece in pieces for token in piece]


def _weighted(pieces: Sequence[Sequence[int]], whole: Sequence[int], tokenizer: TextTokenizer, place: str) -> WeightedTokens:
    """Return ``pieces``, of which every second one has a loss, as one document.

    Args:
        whole: the ids of the text as a whole. The pieces may differ from it, because a token of it may span two pieces, but
            they must have the same text.

    Raises:
        CorruptRecord: they have not.
    """
    ids = _joined(pieces)
    if ids != list(whole) and tokenizer.decode(ids) != tokenizer.decode(whole):
        why = "the tokenizer does not encode a completion apart from its prompt"
        raise CorruptRecord(place, why, "use another tokenizer")
    weights = numpy.repeat([number % 2 for number in range(len(pieces))], [len(piece) for piece in pieces])
    found: Any = numpy.array(ids, numpy.uint32)
    return WeightedTokens(found, weights.astype(numpy.float32), whole=True)
