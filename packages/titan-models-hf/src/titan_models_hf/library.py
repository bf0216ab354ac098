"""The library's model for arguments, before anything of Titan is in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from titan_core.api import UserError
from titan_core.toolkit.errors import nearest
from titan_core.toolkit.text import show
from titan_models_hf import families, transformers_private as library
from titan_models_hf.config import HFArgs

OTHER_MODEL = "choose another model"


def refusal(args: HFArgs, why: str, fix: str = OTHER_MODEL) -> UserError:
    """Return the error that a model of ``args`` is refused with."""
    return UserError.one(f"model.args.architecture {args.architecture!r}", why, fix)


def configuration(args: HFArgs) -> Any:
    """Return the library's config, which the caller may change.

    Raises:
        UserError: the library has no such architecture or key, or rejects a value.
    """
    names = library.architectures()
    if args.architecture not in names:
        why = f"transformers {library.VERSION} has no causal language model of this name"
        raise refusal(args, why, nearest(args.architecture, names))
    known = library.config_keys(args.architecture)
    for key in args.config:
        if key not in known:
            why = f"the config of {args.architecture!r} has no such key"
            raise UserError.one(f"model.args.config.{key}", why, nearest(key, sorted(known)))
    for name, other in library.renamed_keys(args.architecture).items():
        if name in args.config and other in args.config and args.config[name] != args.config[other]:
            why = f"is {args.config[name]!r}, but {other}, another name of the same key, is {args.config[other]!r}"
            raise UserError.one(f"model.args.config.{name}", why, "give one of the two")
    try:
        config = library.configuration(args.architecture, args.config)
    except Exception as error:  # the library's validation raises various types
        raise UserError.one("model.args.config", rejection(error), "correct the keys that it names") from error
    _require_rope(args, config)
    return config


def rejection(error: Exception) -> str:
    """Return the reason for which a config is refused that made the library raise ``error``."""
    return f"transformers rejects it: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _require_rope(args: HFArgs, config: Any) -> None:
    """Require that the rotary frequencies are those that the arguments state. The library reads one of several spellings,
    and of some families not each."""
    resolved = getattr(config, "rope_parameters", None)
    spelled = "rope_scaling" if args.config.get("rope_scaling") else "rope_parameters"
    given = args.config.get(spelled)
    if not isinstance(resolved, dict) or "rope_theta" not in dict(_leaves(resolved)):
        return
    stated = [(f"{spelled}.{key}", key, value) for key, value in _leaves(given) if key in ("rope_theta", "factor")]
    tables = [_leaves(args.config.get(name)) for name in ("rope_scaling", "rope_parameters")]
    if args.config.get("rope_theta") is not None and not any("rope_theta" in dict(one) for one in tables):
        stated.append(("rope_theta", "rope_theta", args.config["rope_theta"]))
    for place, key, value in stated:
        if (key, value) not in _leaves(resolved):
            why = f"is {show(value)}, which transformers does not read: its rope_parameters are {show(resolved)}"
            raise UserError.one(f"model.args.config.{place}", why, "write it into rope_parameters, in their form")
    inner = [name for name, value in resolved.items() if isinstance(value, dict)]
    if inner and not library.rope_layers(config):
        why = f"is a table of layers of this type, and the model has none; its rope_parameters are {show(resolved)}"
        raise UserError.one(f"model.args.config.{spelled}.{inner[0]}", why, "write its keys into rope_parameters itself")


def _leaves(table: Any) -> list[tuple[str, Any]]:
    """Return the keys and values of a table, and of those in it."""
    items = list(table.items()) if isinstance(table, dict) else []
    return [*items, *(leaf for _, value in items for leaf in _leaves(value))]


def plain_model(args: HFArgs) -> Any:
    """Return the library's model on the meta device, with what its family computes outside of modules moved into them.

    Raises:
        UserError: see :func:`configuration`; or the library cannot build the model.
    """
    config = configuration(args)
    try:
        with torch.device("meta"):
            model = library.build(config)
    except Exception as error:
        why = f"building it raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise refusal(args, why, "correct model.args.config, or choose another model") from error
    families.adapt(model, args.architecture)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # The row of a padding token learns like all others: Titan's sequences have no padding, and a vocabulary that is
            # sharded has no such row.
            module.padding_idx = None
    return model
