"""A user's formatting functions."""

from collections.abc import Mapping

NUMBER = 3


def joined(record: Mapping[str, str]) -> str:
    return f"{record['question']}: {record['answer']}"


def to_chat(record: Mapping[str, str]) -> dict[str, str]:
    return {"prompt": record["instruction"], "completion": record["output"]}
