"""JSON Schema of a recipe, so that an editor completes and checks its keys."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from titan_core.api import Registry
from titan_core.api.config.sections import StageEntry
from titan_core.toolkit.fields import field_docs, model_families


def json_schema(registry: Registry) -> dict[str, Any]:
    """Return the schema of a recipe for the plugins of ``registry``. ``[model.args]`` accepts those of any model family."""
    sections = registry.sections()
    families = model_families(registry)
    described: tuple[type[BaseModel], ...] = (
        *(cls for owners in sections.values() for cls in owners),
        *families.values(),
        StageEntry,
    )
    references, definitions = models_json_schema([(cls, "validation") for cls in described], ref_template="#/$defs/{model}")
    for cls in described:
        properties = _definition(definitions, references[cls, "validation"])["properties"]
        for key, text in field_docs(cls).items():
            properties[key]["description"] = text
    for cls in families.values():
        # A recipe sets only the arguments that differ from the flavor, so none is required.
        _definition(definitions, references[cls, "validation"]).pop("required", None)
    properties = {}
    for name, owners in sections.items():
        merged: dict[str, Any] = {}
        for cls in owners:
            merged |= _definition(definitions, references[cls, "validation"])["properties"]
        properties[name] = {"type": "object", "properties": merged, "additionalProperties": False}
    args = properties["model"]["properties"]["args"]
    properties["model"]["properties"]["args"] = {
        "description": args["description"],
        "anyOf": [references[cls, "validation"] for cls in families.values()] or [{"type": "object"}],
    }
    own = _definition(definitions, references[StageEntry, "validation"])["properties"]
    stage = {"type": "object", "properties": {**own, **properties}, "additionalProperties": False}
    properties["stages"] = {"description": "Parts of the run after its first.", "type": "array", "items": stage}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Titan recipe",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions["$defs"],
    }


def _definition(definitions: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    definition: dict[str, Any] = definitions["$defs"][reference["$ref"].removeprefix("#/$defs/")]
    return definition
