"""Values of a ``config.json`` are read with their types, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from titan_nn.hf_config import count, flag, number, table, within_vocabulary


@pytest.mark.parametrize(
    ("read", "value", "result"),
    [
        (count, 4, 4),
        (number, 2, 2.0),
        (flag, True, True),
        (flag, None, False),
        (table, {"a": 1}, {"a": 1}),
        (table, None, {}),
    ],
)
def test_values(read: Callable[[dict[str, Any], str], Any], value: object, result: object) -> None:
    found = read({"key": value}, "key")
    assert found == result and type(found) is type(result)


@pytest.mark.parametrize(
    ("read", "value", "why"),
    [
        (count, 0, "is 0, not a whole number above 0"),
        (count, True, "is true, not a whole number above 0"),
        (count, 2.0, "is 2.0, not a whole number above 0"),
        (count, 10**30, "and must be at most"),
        (number, -1.5, "is -1.5, not a number above 0"),
        (number, float("nan"), "not a number above 0"),
        (number, "1", "not a number above 0"),
        (flag, 1, "is 1, not true or false"),
        (table, [], "not an object"),
    ],
)
def test_refusals_name_the_key(read: Callable[[dict[str, Any], str], Any], value: object, why: str) -> None:
    with pytest.raises(ValueError, match=r"^key is ") as refused:
        read({"key": value}, "key")
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "result"),
    [
        ("eos_token_id", 9, 9),
        ("eos_token_id", 10, None),
        ("eos_token_id", [9, 10], [9]),
        ("eos_token_id", [10, 11], None),
        ("suppress_tokens", [], []),
        ("bad_words_ids", [[1, 2], [1, 10]], [[1, 2]]),
        ("hidden_size", 10, 10),
    ],
)
def test_ids_outside_of_the_vocabulary_are_left_out(key: str, value: object, result: object) -> None:
    assert within_vocabulary(key, value, vocab_size=10) == result
    assert within_vocabulary(key, value, vocab_size=None) == value
