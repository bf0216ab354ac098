"""A plugin with models, datasets and a recipe for tests, so that a package's suite needs no other package. Its metadata is
``titan_harness-1.0.dist-info`` in ``tests/``, which is on the path of every test and of the processes that tests start."""

from __future__ import annotations

from typing import Any

from harness import packed
from harness.noisy import NOISY_ARGS
from titan_core.api import Dataset, Model, Recipe, RecordFormat, Ref, hookimpl, recipes_in

api = (1, 0)


@hookimpl
def titan_models() -> list[Model]:
    tiny: Ref[Any] = Ref("titan_testing.tiny:define")
    return [
        Model(name="noisy", summary="randomness and buffers, for tests", flavors={"tiny": NOISY_ARGS}, define=tiny),
        Model(
            name="packed",
            summary="packed weights in another format, for tests",
            flavors={"tiny": packed.ARGS},
            define=tiny,
            formats=(packed.FORMAT,),
        ),
    ]


@hookimpl
def titan_formats() -> list[RecordFormat]:
    return [
        RecordFormat(name=name, summary="for tests", convert=Ref(f"harness.formats:{name}"))
        for name in ("joined", "to_chat")
    ]


@hookimpl
def titan_datasets() -> list[Dataset]:
    opens: Ref[Any] = Ref("harness.letters:open_letters")
    prompts: Ref[Any] = Ref("harness.prompts:open_prompts")
    tagged: Ref[Any] = Ref("harness.tagged:open_tagged")
    fields: Ref[Any] = Ref("harness.tagged:fields")
    return [
        Dataset(name="letters", summary="documents of given lengths, for tests", build=opens),
        Dataset(name="prompts", summary="documents with token weights, for tests", build=prompts, holds_tokens=True),
        Dataset(name="tagged", summary="a value for each token", build=tagged, holds_tokens=True, extras=fields),
        Dataset(name="kinds", summary="a value for each document", build=tagged, holds_tokens=True, extras=fields),
    ]


@hookimpl
def titan_recipes() -> list[Recipe]:
    return recipes_in("harness")
