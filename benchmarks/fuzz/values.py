"""Random values for config keys: some that the type of the key allows, and some that nothing should accept."""

from __future__ import annotations

import math
import random
import types
import typing
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

ABSURD: tuple[Any, ...] = (
    math.nan, math.inf, -math.inf, 1e300, -1e300, 1e30, 1e-300, -0.0, 5e-324, 10**30, -(10**30), 2**63, 2**63 - 1, -(2**63),
    2**31, 10**12, 10**9, 10**6, -1, 0, 1, True, False, "", " ", "\0", "a\0b", "a" * 300, "x" * 100_000, "/" * 5000, "../..",
    "/dev/null", "/dev/zero", "/proc/self/mem", "~", "s3://user:pass@host/x?token=abc", "file:///nowhere", "https://", "://",
    "*", "[", "**/*", "{a,b}", "caf\u00e9", "\u202e", "\ud800", "\U0001f600" * 80, "none", "nan", "1e999", "0x10", "1_000",
    "9" * 5000, [], {}, [[]], [[[[[[]]]]]], {"a": {"b": {"c": 1}}}, [None], ["\0"], [math.nan], [10**30], {"": 1}, {"\0": 1},
)  # fmt: skip


def nested(depth: int) -> Any:
    """Return lists nested ``depth`` deep."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def random_value(annotation: Any, rng: random.Random) -> Any:
    """Return a value for a key of type ``annotation``; about half of the values have that type."""
    if rng.random() < 0.5:
        return rng.choice(ABSURD) if rng.random() < 0.97 else nested(rng.choice((5, 50, 900)))
    return _fitting(annotation, rng)


def _fitting(annotation: Any, rng: random.Random) -> Any:
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _fitting(get_args(annotation)[0], rng)
    if origin in (typing.Union, types.UnionType):
        return _fitting(rng.choice([member for member in get_args(annotation) if member is not type(None)]), rng)
    if origin is Literal:
        return rng.choice(get_args(annotation))
    if origin is list:
        return [_fitting(get_args(annotation)[0], rng) for _ in range(rng.randint(0, 3))]
    if origin is dict:
        return {rng.choice(("dim", "n_layers", "x")): rng.choice((1, 2, 64, "a"))}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = rng.sample(list(annotation.model_fields), rng.randint(0, len(annotation.model_fields)))
        return {name: _fitting(annotation.model_fields[name].annotation, rng) for name in fields}
    if annotation is bool:
        return rng.random() < 0.5
    if annotation is int:
        return rng.choice((-1, 0, 1, 2, 3, 4, 7, 8, 16, 64, 100, 1000, 4096, 10**5, 10**6, 10**9, rng.randrange(10**4)))
    if annotation is float:
        return rng.choice((0.0, 0.1, 0.5, 1.0, 2.0, 1e-8, 1e-3, 10.0, 100.0, 1e4, 1e6, rng.random()))
    return rng.choice(
        ("op", "2", "*", "stdlib", "byte", "json", "debug", "layers.1", "tests", "outputs/x", "a/b.csv", "layers.*")
    )
