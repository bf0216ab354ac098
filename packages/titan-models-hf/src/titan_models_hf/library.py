"""The library's model for arguments, before anything of Titan is in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from titan_core.api import UserError
from titan_core.toolkit.errors import nearest
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
        return library.configuration(args.architecture, args.config)
    except Exception as error:  # the library's validation raises various types
        why = f"transformers rejects it: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError.one("model.args.config", why, "correct the keys that it names") from error


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
