"""``titan checkpoint convert``: converting between Titan checkpoints, the formats that model plugins declare, and
``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from titan_ckpt.config import HUB_NAME
from titan_ckpt.foreign.config import kind_of
from titan_ckpt.foreign.exporting import to_dcp, to_hf
from titan_ckpt.foreign.hf_export import given_tokenizer
from titan_ckpt.foreign.importing import Foreign, import_weights, open_dcp_weights, open_foreign_weights
from titan_ckpt.format.new_folder import new_folder, require_new
from titan_ckpt.format.tokenizer_files import files_at
from titan_core.api import CommandContext, Recipe, UserError
from titan_core.toolkit.processes import end_with_parent
from titan_core.toolkit.text import say

if TYPE_CHECKING:
    from titan_ckpt.foreign.hub_push import HubRepository

_ONLY_FOR = {
    "to": ("titan",),
    "inference": ("titan",),
    "push": ("titan",),
    "model": ("safetensors", "consolidated"),
    "recipe": ("dcp",),
    "exclude": ("dcp",),
    "allow_pickle": ("dcp",),
}
"""Options that apply to some sources only."""
_SHOWN = {
    "titan": "a Titan checkpoint",
    "safetensors": "Hugging Face weights",
    "consolidated": "Meta's weights",
    "dcp": "a DCP folder",
}


def run(context: CommandContext) -> int:
    """Convert to or from Titan's format, depending on the source."""
    end_with_parent()  # a run that exports each checkpoint
    arguments = context.arguments
    source, target = Path(arguments.source), Path(arguments.target)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    kind = kind_of(source) if source.is_dir() else None
    require_new(target, checkpoint=kind is not None)
    _require_options_apply(context, kind or "titan")
    repository = _repository(arguments.push)
    foreign = _open(context, source, kind) if kind is not None else None
    step = 0
    with new_folder(target) as partial:
        if foreign is not None:
            import_weights(foreign, partial, dtype, _tokenizer_files(arguments.tokenizer, foreign))
        elif arguments.to == "dcp":
            to_dcp(arguments.source, partial, context.registry, dtype)
        else:
            step = to_hf(arguments.source, partial, context.registry, dtype, arguments.tokenizer, arguments.inference)
    say(f"wrote {target}")
    if repository is not None:
        say(f"pushed {repository.push(target, f'step {step}')}")
    if foreign is not None and foreign.left_out:
        shown = (name if number == 1 else f"{name} ({number} entries)" for name, number in foreign.left_out.items())
        say(f"not imported: {', '.join(shown)}")
    return 0


def _repository(name: str | None) -> HubRepository | None:
    """Return the repository on the hub to push to, if any.

    Raises:
        UserError: nothing can be pushed to it.
    """
    if name is None:
        return None
    from titan_ckpt.foreign.hub_push import HubRepository

    if not re.fullmatch(HUB_NAME, name):
        raise UserError.one(f"--push {name}", "is not the name of a repository", "write it as OWNER/NAME")
    return HubRepository(name, "--push")


def _require_options_apply(context: CommandContext, kind: str) -> None:
    """Require every option to have an effect on a source of this kind.

    Raises:
        UserError: an option has none.
    """
    arguments = vars(context.arguments)
    given = [key for key in _ONLY_FOR if arguments.get(key)]
    wrong = [f"--{key.replace('_', '-')}" for key in given if kind not in _ONLY_FOR[key]]
    if kind != "dcp":
        wrong += [f"--{override.key}" for override in context.overrides]
    elif arguments["model"]:
        wrong.append("--model")
    elif other := [override.key for override in context.overrides if not override.key.startswith("model.")]:
        wrong += [f"--{key}" for key in other]
    if arguments["to"] == "dcp":
        wrong += [f"--{key}" for key in ("tokenizer", "inference", "push") if arguments[key]]
    if wrong:
        raise UserError.one(wrong[0], f"has no effect on the conversion of {_SHOWN[kind]}", "leave it out")


def _open(context: CommandContext, source: Path, kind: str) -> Foreign:
    """Open weights in another format.

    Raises:
        UserError: no installed model supports them, or their files are missing, damaged or not allowed.
    """
    arguments = context.arguments
    if kind != "dcp":
        return open_foreign_weights(source, kind, context.registry, arguments.model)
    if not arguments.allow_pickle:
        why = (
            "is a pickle, which is read only on request: with an unpickler that accepts nothing but the classes of torch's "
            "metadata, and executes no code from the file"
        )
        raise UserError.one(f"{source}/.metadata", why, "add --allow-pickle")
    named = "recipe" in arguments or any(override.key.startswith("model.tokenizer") for override in context.overrides)
    if "recipe" not in arguments:
        default = next((recipe.name for recipe in context.registry.all(Recipe) if recipe.default), None)
        if default is None or not context.overrides:
            why = "is a torch.distributed.checkpoint folder, which does not describe its model"
            fix = "add --recipe RECIPE|FILE, or --model.flavor NAME and further --model.* keys"
            raise UserError.one(str(source), why, fix)
        arguments.recipe = default
    model, args = context.model()
    about = {"config": {"model": context.config().as_dict()["model"]}} if named and not arguments.tokenizer else {}
    return open_dcp_weights(source, model, args, arguments.exclude, about)


def _tokenizer_files(chosen: str | None, foreign: Foreign) -> dict[str, bytes]:
    """Return the files of the ``chosen`` tokenizer; by default that of the recipe, or else that beside the weights.

    Raises:
        UserError: there is no tokenizer at ``chosen``, or one of its files leads elsewhere.
    """
    if chosen is not None:
        return given_tokenizer(chosen)
    of_recipe = foreign.about.get("config", {}).get("model", {}).get("tokenizer_path")
    return files_at(Path(of_recipe).expanduser() if of_recipe else foreign.source)
