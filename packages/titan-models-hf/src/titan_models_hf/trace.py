"""One call of a model on the meta device, which records what its attentions compute and the order of its modules.

The library's models build the mask that their eager implementation adds to the scores, and pass keywords (``sliding_window``
and others) from which kernels compute the same. An attention function that ignores the mask, as Titan's does, is right only
if the two agree: here, the *function* of the mask is evaluated at the boundary positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from titan_core.api import UserError
from titan_models_hf import mixers, transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.facts import Attention
from titan_models_hf.library import OTHER_MODEL, refusal
from titan_models_hf.random_keys import Drawing, random_keys
from titan_models_hf.rearranged import rearranged_model

NAME: Final = "titan_trace"
_TOKENS: Final = (2, 16)
_MOST_SHOWN: Final = 4
"""Places that a message names."""


class OwnAttention(Exception):
    """Raised within the traced call: the model computes with the mask itself."""


class Refused(Exception):
    """Raised within the traced call: why the model is refused."""

    def __init__(self, why: str, fix: str = OTHER_MODEL) -> None:
        super().__init__(why)
        self.fix = fix


def _refuse_computation(*arguments: Any, **keywords: Any) -> Any:
    raise OwnAttention


class Mask:
    """A mask that a model requests: which keys a query sees, as a function of their positions. A model may only pass it to
    its attention function."""

    __add__ = __radd__ = __mul__ = __rmul__ = __getitem__ = __eq__ = __lt__ = __invert__ = _refuse_computation
    __hash__ = object.__hash__

    def __init__(self, function: Callable[..., Tensor] | None) -> None:
        """
        Args:
            function: the library's: (batch, head, query, key) -> bool; ``None``: causal.
        """
        self._function = function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # what Python itself looks for
        return _refuse_computation()

    def sees(self, query: int, key: int) -> bool:
        """Return whether position ``query`` sees position ``key``."""
        if self._function is None:
            return key <= query
        with torch.device("cpu"):
            zero = torch.zeros((), dtype=torch.int64)
            return bool(self._function(zero, zero, torch.tensor(query), torch.tensor(key)))

    def is_causal(self, window: int | None) -> bool:
        """Return whether a query sees itself and the ``window - 1`` positions before it (``None``: all), and no others."""
        far = 1 << 20
        reach = far if window is None else window
        points = [(0, 0), (5, 5), (5, 6), (9, 0), (63, 64), (64, 63), (far, far + 1), (far, far), (far, far - 1)]
        points += [(far, far - reach + 1), (reach + 7, 8)]
        if window is not None:
            points += [
                (far, far - reach),
                (reach + 7, 7),
                (reach, 0),
                (reach - 1, 0),
                (2 * reach, reach + 1),
                (2 * reach, reach),
            ]
        return all(
            self.sees(query, key) == (key <= query and (window is None or query - key < window)) for query, key in points
        )


@dataclass
class Trace:
    """What one call of a model did."""

    attentions: dict[str, Attention] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    """Number of calls of each module, in the order of their first calls."""
    results: dict[str, int] = field(default_factory=dict)
    """Modules that return tuples with one tensor, which is the first item -> number of items."""
    experts: dict[str, int] = field(default_factory=dict)
    """Modules of experts -> number of experts that a token uses."""
    routers: dict[str, tuple[torch.Size, int, int]] = field(default_factory=dict)
    """Modules that return (logits, weights, indices) -> shape of what they are called with, number of experts, and number of
    experts that a token uses."""
    flat: set[str] = field(default_factory=set)
    """Modules that are called with the positions of all sequences in one dimension."""
    masks: int = 0
    """Number of masks that the model has requested."""
    eager: bool = False
    """Whether the model runs with the library's eager implementation: its attention is code of its own, with a bias by
    position, for example. Nothing then divides its sequences."""
    names: dict[int, str] = field(default_factory=dict)
    drawing: Drawing = field(default_factory=Drawing)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **keywords: Any
    ) -> tuple[Tensor, None]:
        """Record an attention. The arguments are those of :func:`titan_models_hf.mixers.attend`."""
        name = self.names[id(module)]
        if name in self.attentions:
            raise Refused(f"attention {name!r} is called twice")
        if strange := mixers.unknown(keywords):
            raise Refused(f"attention {name!r} is called with {', '.join(strange)}, which Titan does not know")
        mask = attention_mask
        if mask is not None and not isinstance(mask, Mask):
            raise Refused(f"attention {name!r} adds a mask of its own to its scores")
        if keywords.get("dropout"):
            self.drawing.draws[name, "dropout of its weights"] += 1
        window = keywords.get("sliding_window")
        if not (mask or Mask(None)).is_causal(window):
            reach = "causal" if window is None else f"a causal window of {window} positions"
            raise Refused(f"the mask of attention {name!r} is not {reach}, which its keywords request")
        width, scale = query.shape[3], keywords.get("scaling")
        self.attentions[name] = Attention(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_width=width,
            value_width=value.shape[3],
            window=window,
            softcap=keywords.get("softcap"),
            scale=None if scale is None or scale == width**-0.5 else float(scale),
            sinks=keywords.get("s_aux") is not None,
            documents="documents" in keywords,
        )
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    def compute_experts(self, module: nn.Module, hidden: Tensor, indices: Tensor, *weights: Tensor) -> Tensor:
        """Record a module of experts: (hidden ``[tokens, dim]``, indices ``[tokens, experts of a token]``, weights)."""
        self.experts[self.names[id(module)]] = indices.shape[-1]
        return torch.zeros_like(hidden)

    def enter(self, module: nn.Module, arguments: Any) -> None:
        """Record that a module is called; a forward pre-hook."""
        name = self.names[id(module)]
        self.drawing.inside.append(name)
        self.calls[name] = self.calls.get(name, 0) + 1
        if arguments and isinstance(arguments[0], Tensor) and arguments[0].dim() == 2:
            self.flat.add(name)

    def leave(self, module: nn.Module, arguments: Any, result: Any) -> None:
        """Record what a module returns; a forward hook."""
        self.drawing.inside.pop()
        if (
            isinstance(result, tuple)
            and len(result) == 3
            and len(arguments) == 1
            and all(isinstance(item, Tensor) for item in (*arguments, *result))
            and result[1].shape == result[2].shape
            and result[2].dtype == torch.int64
        ):
            self.routers[self.names[id(module)]] = (arguments[0].shape, result[0].shape[-1], result[2].shape[-1])
        if (
            isinstance(result, tuple)
            and result
            and isinstance(result[0], Tensor)
            and not any(item is not None for item in result[1:])
        ):
            self.results[self.names[id(module)]] = len(result)


_current: Trace | None = None


def _attend(*arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
    assert _current is not None, "only a traced model uses this attention function"
    return _current.attend(*arguments, **keywords)


def _experts(module: nn.Module, hidden: Tensor, *routing: Tensor) -> Tensor:
    assert _current is not None, "only a traced model uses this experts function"
    return _current.compute_experts(module, hidden, *routing)


def _mask(*arguments: Any, mask_function: Any = None, **keywords: Any) -> Mask:
    assert _current is not None, "only a traced model uses this mask function"
    _current.masks += 1
    return Mask(mask_function)


library.register(NAME, _attend, _mask)
library.register_experts(NAME, _experts)


def trace(args: HFArgs) -> Trace:
    """Return what a call of the model does.

    Raises:
        UserError: Titan does not understand what it computes.
    """
    try:
        found = _traced(args, NAME)
        own = bool(found.masks) and not found.attentions
    except OwnAttention:
        own = True
    implementation = library.EAGER if own else NAME
    if own:
        found = _traced(args, implementation)
    drawing = found.drawing
    if drawing.draws and (keys := random_keys(args, drawing, lambda other: _traced(other, implementation).drawing)):
        places = [f"{name!r} ({operator})" for name, operator in drawing.draws]
        if len(places) > _MOST_SHOWN:
            places[_MOST_SHOWN:] = [f"{len(places) - _MOST_SHOWN} more"]
        given = " and ".join(f"{key} = {value}" for key, value in keys.items())
        why = f"{given} let it draw random numbers in training, which would depend on the mesh: in {', '.join(places)}"
        fix = ", ".join(f"{key} = 0.0" for key in keys)
        raise refusal(args, why, f"set {fix} in model.args.config")
    return found


def _traced(args: HFArgs, implementation: str) -> Trace:
    """Call the model with this implementation of attention.

    Raises:
        OwnAttention: it computes with a mask itself, and the implementation records masks.
        UserError: see :func:`trace`.
    """
    global _current
    model, _ = rearranged_model(args)
    _require_supported(args, model)
    found = Trace(names={id(module): name for name, module in model.named_modules()}, eager=implementation == library.EAGER)
    library.use_attention(model, implementation)
    library.use_experts(model, NAME)
    for module in model.modules():
        module.register_forward_pre_hook(found.enter)
        module.register_forward_hook(found.leave)
    tokens = torch.zeros(_TOKENS, dtype=torch.int64, device="meta")
    more = {} if found.eager else {"documents": tokens}
    before, _current = _current, found
    try:
        with torch.no_grad(), library.without_packing(), found.drawing:
            model.train()(input_ids=tokens, use_cache=False, **more)
    except (UserError, OwnAttention):
        raise
    except Refused as error:
        raise refusal(args, str(error), error.fix) from error
    except Exception as error:
        place = f"in module {found.drawing.inside[-1]!r}" if found.drawing.inside[-1] else "outside of its modules"
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        why = f"the library's own forward fails {place} ({cause}) when it is called on the meta device"
        fix = (
            "correct the keys of model.args.config that this module reads: layers, their types and their numbers must agree"
        )
        raise refusal(args, why, f"{fix}; or {OTHER_MODEL}") from error
    finally:
        _current = before
    return found


def _require_supported(args: HFArgs, model: Any) -> None:
    """Refuse what Titan's own trial cannot see: it calls the model with few tokens, and compares it with itself."""
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if changing := [kind for kind in kinds if kind in ("dynamic", "longrope")]:
            why = f"{name!r} ({changing[0]} RoPE) chooses its frequencies by the longest position of a call"
            fix = "set rope_type of rope_parameters to another type (yarn, linear, default)"
            raise refusal(args, f"{why}, which differs between ranks and between documents", fix)
    if getattr(model.config, "output_router_logits", False):
        why = "output_router_logits is true: the library adds a loss of the routers, and Titan's objective does not"
        raise refusal(args, why, "set it to false")
