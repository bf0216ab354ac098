"""Functions of a model's definition are guarded, and what it says of its parameters is checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.odd_plugin import ORIGIN
from titan_core.api import Computed, Mixer, ModelDefinition, ModelLayout, Ref
from titan_core.plugins.results import RETURNS
from titan_core.toolkit.errors import PluginFailure


def definition(**changed: Any) -> ModelDefinition:
    """Return a definition whose functions fail."""

    def fails(*_: object) -> Any:
        raise ZeroDivisionError

    layout = ModelLayout(
        num_blocks=1, dim=1, vocab_size=1, max_seq_len=1, embedding=(), blocks="blocks", head=(), buffers={"*": fails},
        mixers={"m": Mixer(kind="odd", divided=Ref("odd:raises"))}, parameters={"p": Computed(Ref("odd:raises"))},
    )  # fmt: skip
    made = ModelDefinition(layout=layout, build=fails, num_params=1, flops_per_token=fails)
    of_layout = {name: value for name, value in changed.items() if name in ModelLayout.__dataclass_fields__}
    own = {name: value for name, value in changed.items() if name not in of_layout}
    return replace(made, layout=replace(layout, **of_layout), **own)


def test_a_definition_is_guarded_too() -> None:
    made = RETURNS["Model.define"](ORIGIN, definition())
    divided = made.layout.mixers["m"].divided
    assert divided.origin is ORIGIN and made.layout.parameters["p"].values.origin is ORIGIN
    for call in (made.build, lambda: made.flops_per_token(3), made.layout.buffers["*"]):
        with pytest.raises(PluginFailure, match="plugin 'odd'"):
            call()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"exact": "*.router.weight"}, "returned exact = '\\*.router.weight'; it must be a tuple of patterns"),
        ({"num_params": 7, "num_active_params": 8}, "returned num_active_params = 8; .* from 1 to num_params = 7"),
        ({"num_active_params": True}, "returned num_active_params = True"),
        ({"statistics": {"rows": [4, 8]}}, r"returned statistics = \{'rows': \[4, 8\]\}; it must map names"),
        ({"statistics": {"rows": (4, 0)}}, "returned statistics = .* tuples of whole numbers, at least 1"),
        ({"statistics": {"rows of experts": (4,)}}, "returned statistics = .* a word of letters"),
        ({"statistics": ("rows",)}, "returned statistics = "),
        ({"routers": {"*.router": 2}}, "returned routers = .* it must map patterns to Routers"),
    ],
    ids=str,
)
def test_what_a_definition_says_of_its_parameters_is_checked(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginFailure, match=message):
        ORIGIN.call("define", lambda: definition(**changed), (), RETURNS["Model.define"])
