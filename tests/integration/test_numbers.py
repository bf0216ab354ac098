"""Absurd numbers, texts and nesting in a config are refused, whichever plugin owns the key."""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ValidationError

from titan_ckpt.config import CheckpointSection
from titan_completion.schema import json_schema
from titan_core.api import Model, OptimizerSection, Section
from titan_core.api.config.numbers import LARGEST
from titan_core.api.config.sections import CommSection, JobSection, TrainingSection
from titan_core.config.problems import problems_of
from titan_core.plugins.registry import Components
from titan_report.config import TensorBoardKeys

REGISTRY = Components.from_installed()
ABSURD = (math.nan, math.inf, -math.inf, 1e300, 10**30, -(10**30))
UNBOUNDED = {"training.seed", "sample.seed"}
"""Keys that accept any 64-bit number."""


def kinds(annotation: Any) -> set[type]:
    """Return the plain types in ``annotation``, also inside lists and unions."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType, list):
        return set().union(*map(kinds, typing.get_args(annotation)))
    return {annotation} if isinstance(annotation, type) else set()


def keys() -> Iterator[tuple[str, type[BaseModel], tuple[str, ...], Any]]:
    """Yield (dotted key, class that validates it, path of the value in it, type) of every key, including nested models."""
    classes = [(name, cls) for name, owners in REGISTRY.sections().items() for cls in owners]
    classes += [("model.args", type(next(iter(model.flavors.values())))) for model in REGISTRY.all(Model)]
    for name, cls in classes:
        yield from keys_in(name, cls, cls, ())


def keys_in(
    prefix: str, top: type[BaseModel], cls: type[BaseModel], path: tuple[str, ...]
) -> Iterator[tuple[str, type[BaseModel], tuple[str, ...], Any]]:
    for key, field in cls.model_fields.items():
        yield f"{prefix}.{key}", top, (*path, key), field.annotation
        for kind in kinds(field.annotation):
            if issubclass(kind, BaseModel):
                inner = (*path, key, "[]") if typing.get_origin(_bare(field.annotation)) is list else (*path, key)
                yield from keys_in(f"{prefix}.{key}", top, kind, inner)


def _bare(annotation: Any) -> Any:
    """Return ``annotation`` without ``| None``."""
    given = [one for one in typing.get_args(annotation) if one is not type(None)]
    return given[0] if typing.get_origin(annotation) in (typing.Union, types.UnionType) else annotation


def validate(top: type[BaseModel], path: tuple[str, ...], value: Any) -> None:
    for part in reversed(path):
        value = [value] if part == "[]" else {part: value}
    whole = dict(next((model.flavors for model in REGISTRY.all(Model) if type(_first(model)) is top), {})) or None
    base = next(iter(whole.values())).model_dump() if whole else {}
    top.model_validate(base | value)


def _first(model: Model) -> BaseModel:
    return next(iter(model.flavors.values()))


NUMERIC = [
    pytest.param(top, path, annotation, id=f"{key}-{top.__name__}")
    for key, top, path, annotation in keys()
    if kinds(annotation) & {int, float}
]


def test_nested_keys_of_all_plugins_are_covered() -> None:
    found = {key for key, *_ in keys()}
    assert {
        "optimizer.param_groups.lr_scale", "data.mixture.weight", "model.args.rope_scaling.factor", "float8.recipe_name",
        "profiling.ranks", "checkpoint.interval", "parallelism.pipeline_parallel_layers_per_stage",
    } <= found  # fmt: skip
    assert len(NUMERIC) > 60


@pytest.mark.quick_rows(8)
@pytest.mark.parametrize(("top", "path", "annotation"), NUMERIC)
def test_every_numeric_key_refuses_absurd_numbers(top: type[BaseModel], path: tuple[str, ...], annotation: Any) -> None:
    for number in ABSURD:
        value = [number] if typing.get_origin(_bare(annotation)) is list else number
        with pytest.raises(ValidationError):
            validate(top, path, value)


@pytest.mark.quick_rows(8)
@pytest.mark.parametrize(("top", "path", "annotation"), NUMERIC)
def test_every_numeric_key_has_its_own_bounds(top: type[BaseModel], path: tuple[str, ...], annotation: Any) -> None:
    """The bounds that :class:`Section` sets for all numbers are not enough."""
    if f"{getattr(top, 'section', '')}.{path[-1]}" in UNBOUNDED:
        return
    for number in (10**14, -(10**14)):
        value = [number] if typing.get_origin(_bare(annotation)) is list else number
        with pytest.raises(ValidationError):
            validate(top, path, value)


def _message(top: type[BaseModel], key: str, value: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        top.model_validate({key: value})
    (problem,) = problems_of(caught.value, "it", top, {}, lambda key, value: key)
    return problem.why


def test_messages_name_the_bounds_of_their_own_keys() -> None:
    for key, top, path, annotation in keys():
        plain = len(path) == 1 and typing.get_origin(_bare(annotation)) is not list
        if not (plain and issubclass(top, Section) and kinds(annotation) & {int, float}) or key in UNBOUNDED:
            continue
        for number in (10**30, 1e30, -1e30, 10**14, 1e14):
            why = _message(top, path[0], number)
            assert re.search(r"(at least|at most|greater than|less than) -?[0-9]", why), (key, why)
            assert "9.2" not in why and "000000000000" not in why, (key, why)


def test_numbers_in_messages_are_short() -> None:
    assert _message(OptimizerSection, "eps", 1e-40) == "must be at least 1e-30"
    assert (
        _message(CommSection, "train_timeout_seconds", 1e12) == "must be a whole number, greater than 0 and at most 2592000"
    )
    assert _message(TrainingSection, "seed", 2**70) == "must be less than 9223372036854775808"


def test_the_json_schema_contains_the_bounds() -> None:
    schema = json_schema(REGISTRY)
    steps = schema["properties"]["training"]["properties"]["steps"]
    assert steps["exclusiveMinimum"] == 0 and steps["maximum"] == 10**9
    json.dumps(schema, allow_nan=False)


class ThirdParty(Section):
    """A section whose fields have no bounds."""

    section: ClassVar[str] = "third_party"

    count: int = 0
    share: float = 0.0
    name: str = ""
    table: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies the default


@pytest.mark.parametrize("value", [*ABSURD, LARGEST + 1, -LARGEST - 1])
def test_third_party_numbers_are_bounded(value: float) -> None:
    for field in ("count", "share"):
        with pytest.raises(ValidationError):
            ThirdParty.model_validate({field: value})
    with pytest.raises(ValidationError, match=r"a\.b\[1\] must (not exceed|be a finite number)"):
        ThirdParty.model_validate({"table": {"a": {"b": [1, value]}}})
    assert ThirdParty(count=LARGEST).count == LARGEST


@pytest.mark.parametrize(
    ("text", "reason"),
    [("a\0b", "NUL"), ("\ud800", "valid Unicode"), ("x" * 70_000, "at most 65536 characters")],
    ids=["nul", "surrogate", "long"],
)
def test_no_key_accepts_text_that_no_file_can_contain(text: str, reason: str) -> None:
    for value in ({"name": text}, {"table": {"a": text}}, {"table": {"a": [text]}}, {"table": {text: 1}}):
        with pytest.raises(ValidationError, match=reason):
            ThirdParty.model_validate(value)


PATHS = ["job.dump_folder", "model.tokenizer_path", "training.dataset_path", "data.mixture.dataset_path",
         "validation.dataset_path", "validation.sets.dataset_path", "metrics.save_tb_folder", "checkpoint.folder",
         "checkpoint.initial_load_path", "checkpoint.export_folder", "evaluation.include_path",
         "parallelism.pipeline_parallel_schedule_csv", "profiling.save_traces_folder",
         "profiling.save_memory_snapshot_folder", "comm.save_traces_folder", "numerics.save_statistics_folder"]  # fmt: skip


def test_every_path_has_a_path_type() -> None:
    words = ("path", "folder", "csv", "file")
    named = {key for key, _, _, kind in keys() if str in kinds(kind) and any(word in key.split(".")[-1] for word in words)}
    assert named == set(PATHS)


@pytest.mark.parametrize("key", PATHS)
def test_every_path_refuses_names_that_no_file_system_accepts(key: str) -> None:
    top, path = next((top, path) for name, top, path, _ in keys() if name == key)
    for value in ("a" * 256, "b/" + "é" * 128, "c/" * 2500, "d\0e"):
        with pytest.raises(ValidationError):
            validate(top, path, value)


def test_nesting_is_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"a": deep}
    with pytest.raises(ValidationError, match="nested more than 16 deep"):
        ThirdParty.model_validate({"table": deep})


TEXTS = [(key, top, path, annotation) for key, top, path, annotation in keys() if str in kinds(annotation)]


def test_an_empty_text_unsets_an_optional_key() -> None:
    optional = [one for one in TEXTS if {str, type(None)} <= kinds(one[3]) and list not in (one[3], _bare(one[3]))]
    assert {"model.tokenizer_path", "data.mixture.dataset_path", "checkpoint.initial_load_path"} <= {
        one[0] for one in optional
    }
    for key, top, path, _ in optional:
        value: Any = ""
        for part in reversed(path):
            value = [value] if part == "[]" else {part: value}
        if "[]" in path:
            value[path[0]][0] |= {"dataset": "stdlib"} | ({"name": "web"} if key.startswith("validation.") else {})
        found: Any = top.model_validate(value)
        for part in path:
            found = found[0] if part == "[]" else getattr(found, part)
        assert found is None, key


def test_a_required_path_must_not_be_empty() -> None:
    for section, key in [(JobSection, "dump_folder"), (CheckpointSection, "folder"), (TensorBoardKeys, "save_tb_folder")]:
        for empty in ("", "  "):
            with pytest.raises(ValidationError, match=r"must (not be empty|be a folder below)"):
                section.model_validate({key: empty})
