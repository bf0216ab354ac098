"""Formats of records, as a plugin registers them."""

from collections.abc import Mapping


def joined(record: Mapping[str, str]) -> str:
    return f"{record['question']}: {record['answer']}"


def to_chat(record: Mapping[str, str]) -> dict[str, str]:
    return {"prompt": record["instruction"], "completion": record["output"]}
