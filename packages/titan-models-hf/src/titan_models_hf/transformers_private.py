"""Every use of what transformers does not promise to keep, or keeps for its own purposes. Checked with 5.20 to 5.23.

Nothing here runs code of the hub: classes come from the library's own tables, by ``model_type``.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, initialization, masking_utils
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VERSION: str = transformers.__version__
EAGER = "eager"

_ROPE = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
"""Keys that configs with rotary positions also accept, and convert to ``rope_parameters``."""
_OF_ALL = {"is_causal", "per_layer_config", "tie_word_embeddings"}
"""Keys that the library reads of every architecture, although the config class may have no such field."""
_OLD_KEY = re.compile(r"""kwargs\.(?:get|pop)\(\s*["'](\w+)["']""")
"""A key that a config class reads although it has no such field: it had in earlier versions."""
_OPTIONAL_KEY = re.compile(r"""getattr\((?:self\.)?config,\s*["'](\w+)["']""")
"""A key that a model reads although its config class has no such field."""


def architectures() -> list[str]:
    """Return the ``model_type`` of every causal language model of the library."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING]


@cache
def config_keys(architecture: str) -> frozenset[str]:
    """Return the keys that the config of an architecture reads."""
    cls = CONFIG_MAPPING[architecture]
    fields = {field.name for field in dataclasses.fields(cls)}
    with suppress(Exception):  # few configs have no defaults
        fields |= vars(cls()).keys()  # what it computes, a file may state
    model = inspect.getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[cls])
    assert model is not None
    optional = _OPTIONAL_KEY.findall(inspect.getsource(model))
    old = _OLD_KEY.findall(inspect.getsource(cls))
    renamed = renamed_keys(architecture)
    known = {*fields, *optional, *old, *renamed, *renamed.values(), *_OF_ALL}
    known = {key for key in known if not key.startswith("_")} - _ROPE
    return frozenset(known | _ROPE if "rope_parameters" in fields else known)


def renamed_keys(architecture: str) -> dict[str, str]:
    """Return the names of keys that have two: the one that models read, and the one that the library writes into files
    (``num_local_experts`` -> ``num_experts``)."""
    return dict(CONFIG_MAPPING[architecture].attribute_map)


def configuration(architecture: str, keys: Mapping[str, Any]) -> Any:
    """Return the library's config. Numbers that JSON lacks may be written as in its ``config.json``: ``{"__float__":
    "Infinity"}``."""
    return CONFIG_MAPPING[architecture](**PreTrainedConfig._decode_special_floats(copy.deepcopy(dict(keys))))


def configuration_of_file(contents: Mapping[str, Any]) -> Any:
    """Return the config that the library reads from a ``config.json`` with these contents."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(contents), encoding="utf-8")
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def accepts(architecture: str, keys: Mapping[str, Any]) -> bool:
    """Return whether the library's config accepts these keys."""
    try:
        configuration(architecture, keys)
    except Exception:  # noqa: BLE001 (its validation raises various types)
        return False
    return True


def rope_layers(config: Any) -> list[str]:
    """Return the types of layers that have tables of their own in ``rope_parameters``; empty if all share it."""
    return list(config.nested_rope_parameter_keys(config.rope_parameters))


def class_name(architecture: str) -> str:
    """Return the name of the causal language model of an architecture."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[architecture]].__name__)


def build(config: Any) -> Any:
    """Return the library's model with its eager implementations, in float32, on the current default device."""
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    padding, rows = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(padding, int) and isinstance(rows, int) and padding >= rows:
        # The default of a family whose vocabulary is larger than this model's. No padding is trained on.
        config.pad_token_id = None
    model = cls._from_config(config, dtype=torch.float32, attn_implementation=EAGER, experts_implementation=EAGER)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()  # a few modules construct theirs in bfloat16
    for name, source in tied(model).items():  # which the library leaves undone on the meta device
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(source))
    return model


def base_name(model: Any) -> str:
    """Return the name of the model without its head."""
    if hasattr(model, model.base_model_prefix):
        return str(model.base_model_prefix)
    return next(name for name, module in model.named_children() if isinstance(module, PreTrainedModel))


def tied(model: Any) -> dict[str, str]:
    """Return the name of each parameter that is another one -> the name of that one."""
    keys = getattr(model, "_tied_weights_keys", None) or {}
    if not getattr(model.config, "tie_word_embeddings", False):
        return {}
    if not isinstance(keys, dict):
        raise ValueError("it lists tied weights without saying with which")
    return dict(keys)


def use_attention(model: nn.Module, name: str) -> None:
    """Let ``model`` call the attention and mask functions registered as ``name``."""
    for config in _configs(model):
        config._attn_implementation_internal = name


def attention_of(cls: type, config: Any) -> Callable[..., Any]:
    """Return the attention function that modules of class ``cls`` call."""
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, function_of(cls, "eager_attention_forward"))


def function_of(cls: type, name: str) -> Callable[..., Any]:
    """Return a function of the library's module that defines ``cls``."""
    function: Callable[..., Any] = vars(sys.modules[cls.__module__])[name]
    return function


def use_experts(model: nn.Module, name: str) -> None:
    """Let ``model`` call the experts function registered as ``name``."""
    for config in _configs(model):
        config._experts_implementation_internal = name


def _configs(model: nn.Module) -> list[Any]:
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())


def register(name: str, attention: Callable[..., Any], mask: Callable[..., Any] | None = None) -> None:
    """Register an attention function, and the function that makes the masks which it receives. Without one it receives
    ``None`` from models that use the library's mask functions."""
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    if mask is not None:
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)


def register_experts(name: str, function: Callable[..., Tensor]) -> None:
    """Register a function that computes experts: (module, hidden, indices, weights) -> hidden."""
    ALL_EXPERTS_FUNCTIONS.register(name, function)


def expert_activation(module: Any) -> Callable[[Tensor], Tensor]:
    """Return what the experts of ``module`` compute between their two layers."""
    activation: Callable[[Tensor], Tensor] = module._apply_gate if module.has_gate else module.act_fn
    return activation


def tensor_plan(model: Any) -> dict[str, str]:
    """Return the library's plan for tensor parallelism: pattern of module names -> style."""
    prefix = base_name(model)
    plan = getattr(type(model.config), "base_model_tp_plan", None) or {}
    return {f"{prefix}.{pattern}": style for pattern, style in plan.items() if isinstance(style, str)}


def pipeline_plan(model: Any) -> list[str]:
    """Return the modules of the base model that hidden states pass through, in order; empty if the library has no plan."""
    return list(getattr(type(model.config), "base_model_pp_plan", None) or {})


def initialize(model: Any) -> None:
    """Give all tensors of ``model`` their initial values, inner modules first, by the nearest model that contains them."""
    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        owners[name] = module if isinstance(module, PreTrainedModel) else owners[name.rpartition(".")[0]]
    for name, module in reversed(list(model.named_modules())):
        owners[name]._init_weights(module)


@contextmanager
def patched_initialization(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of ``transformers.initialization``."""
    with _patched(initialization, functions):
        yield


@contextmanager
def without_packing() -> Iterator[None]:
    """Do not look for packed sequences in positions, which would compare values of tensors."""
    with _patched(masking_utils, {"find_packed_sequence_indices": lambda position_ids: None}):
        yield


@contextmanager
def _patched(module: Any, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


INITIALIZERS = tuple(
    name
    for name, function in vars(initialization).items()
    if name.endswith("_") and not name.startswith("_") and callable(function)
)
"""The library's functions that fill a tensor with initial values."""


def stored(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the library writes to files for ``tensors`` of ``model``, by their names in the files."""
    return dict(revert_weight_conversion(model, tensors))


def plain_config(config: Any) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    return dict(config.to_dict())
