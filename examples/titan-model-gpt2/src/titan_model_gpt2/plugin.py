"""Registers the model ``gpt2`` and its recipe."""

from typing import Any

from titan_core.api import Model, Recipe, Ref, WeightFormat, hookimpl, recipes_in
from titan_model_gpt2.config import GPT2Args

api = (1, 0)


@hookimpl
def titan_models() -> list[Model]:
    code = {name: Ref[Any](f"titan_model_gpt2.formats:{name}") for name in ("tensors", "to_args", "from_args", "notes")}
    form = WeightFormat(files="safetensors", ignored=("*.attn.bias", "*.attn.masked_bias"), **code)  # causal masks
    debug = {"dim": 96, "n_layers": 4, "n_heads": 4, "vocab_size": 288, "max_seq_len": 512}
    flavors = {"debug": GPT2Args(**debug), "124M": GPT2Args(), "1.5B": GPT2Args(dim=1600, n_layers=48, n_heads=25)}
    define = Ref[Any]("titan_model_gpt2.layout:define")
    return [Model(name="gpt2", summary="GPT-2", flavors=flavors, define=define, formats=(form,))]


@hookimpl
def titan_recipes() -> list[Recipe]:
    return recipes_in("titan_model_gpt2")
