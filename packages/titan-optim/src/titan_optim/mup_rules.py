"""The rules of muP for the parameters of a job: which of their dimensions are widths follows from a base model.

Yang et al., "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer" (arXiv 2203.03466),
Table 3, for Adam. Relative to the base model, with ``r`` the base model's fan-in over the model's:

=====================  ============================  ============  ==================
parameter              widths among its dimensions   standard      learning rate
                                                     deviation
=====================  ============================  ============  ==================
hidden                 fan-in and fan-out            ``sqrt(r)``   ``r``
output                 fan-in                        ``r``         ``r``
input, biases, gains   fan-out, or none              1             1
=====================  ============================  ============  ==================

The table multiplies neither activations nor logits, so the model computes what its arguments say: checkpoints, exports and
generation know nothing of muP. Its scores of attention are divided by the width of a head instead of its root, which are the
same but for a constant if all models have heads of one width; other models are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from pydantic import ValidationError
from torch import nn

from titan_core.api import (
    CAUSAL_ATTENTION,
    Config,
    Constant,
    InitialValue,
    ModelDefinition,
    ModelLayout,
    Normal,
    Problem,
    TruncatedNormal,
    Uniform,
    UserError,
    matches,
)
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.text import show

KEY = "mup.base"
_FIX = "let it differ from model.args in widths only: of hidden states, of feed-forward layers, and the number of heads"


@dataclass(frozen=True)
class WidthRule:
    """What the widths of a parameter change, relative to the base model."""

    std: float = 1.0
    """Factor on the standard deviation of the base model's initial value."""
    lr: float = 1.0
    """Factor on the learning rate."""


@dataclass(frozen=True)
class WidthRules:
    """The rules for the parameters of a job, relative to the base model, whose settings the job shares."""

    config: Config
    layout: ModelLayout
    """That of the base model."""
    shapes: Mapping[str, torch.Size]
    """Shape of each parameter of the base model, by fully qualified name."""

    @classmethod
    def of(cls, job: AssembledJob, base: Mapping[str, int]) -> WidthRules:
        """Define the base model of ``job``, and build it on the meta device.

        Args:
            base: the arguments in which it differs from the job's model.

        Raises:
            UserError: the model rejects them, or they change more than widths.
        """
        family = type(job.model_args)
        try:
            args = family.model_validate({**job.model_args.model_dump(), **base}, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            why = f"the model rejects it: {where and f'{where}: '}{first['msg']}"
            raise UserError(job.config.problem(KEY, why, "give arguments of the model")) from None
        definition: ModelDefinition = job.family.define.load()(args)
        _require_alike(job.config, job.model.layout, definition.layout)
        with torch.device("meta"):
            module = cast(nn.Module, definition.build())
        return cls(job.config, definition.layout, {name: one.shape for name, one in module.named_parameters()})

    def rule(self, name: str, shape: torch.Size) -> WidthRule:
        """Return the rule of the parameter with the fully qualified name ``name`` and ``shape``, undivided.

        Raises:
            UserError: it differs from that of the base model in more than widths, or it is not known which is its fan-in.
        """
        base = self.shapes.get(name)
        if base is None or len(base) != len(shape):
            raise self._refusal(
                f"{name} has shape {list(shape)}, and {'no' if base is None else list(base)} in the base model"
            )
        widths = [dim for dim, (size, before) in enumerate(zip(shape, base, strict=True)) if size != before]
        last = len(shape) - 1
        vector = len(shape) < 2 or name.endswith("bias")
        if vector or not widths or matches(name, [f"{module}.*" for module in self.layout.embedding]):
            return WidthRule()
        if last == 1:
            ratio = base[last] / shape[last]
            return WidthRule(ratio**0.5 if 0 in widths else ratio, ratio) if last in widths else WidthRule()
        ratios = {base[dim] / shape[dim] for dim in widths}
        if len(widths) != 2 or len(ratios) > 1:  # with one ratio, it does not matter which one is the fan-in
            why = f"{name} has shape {list(shape)}, and {list(base)} in the base model"
            raise self._refusal(f"{why}: the widths of a stack must be two, in one proportion")
        ratio = ratios.pop()
        return WidthRule(ratio**0.5, ratio)

    def initial_value(self, name: str, shape: torch.Size) -> InitialValue:
        """Return the initial value of a parameter: that of the base model, scaled.

        Raises:
            UserError: as :meth:`rule`, or the value cannot be scaled.
        """
        value, factor = self.layout.initial_value(name), self.rule(name, shape).std
        assert value is not None, f"layout_check rejects parameters without an initial value, but {name} has none"
        if factor == 1.0 or value == Constant(0.0):
            return value
        if isinstance(value, Normal | TruncatedNormal):
            return replace(value, std=value.std * factor)
        if isinstance(value, Uniform):
            return Uniform(value.low * factor, value.high * factor)
        raise self._refusal(f"the initial value of {name} cannot be scaled by {factor:.3g}: {value}")

    def _refusal(self, why: str) -> UserError:
        return UserError(self.config.problem(KEY, why, _FIX))


def _require_alike(config: Config, layout: ModelLayout, base: ModelLayout) -> None:
    """Require models of one depth and vocabulary, whose heads have one width.

    Raises:
        UserError: they differ.
    """
    problems: list[Problem] = []
    for what in ("num_blocks", "vocab_size"):
        now, before = (vars(one)[what] for one in (layout, base))
        if now != before:
            problems.append(config.problem(KEY, f"changes {what} from {show(now)} to {show(before)}", _FIX))
    for pattern, mixer in layout.mixers.items():
        other = base.mixers.get(pattern)
        if mixer.kind != CAUSAL_ATTENTION or mixer.heads is None or other is None or other.heads is None:
            continue
        if mixer.heads * base.dim != other.heads * layout.dim:
            why = f"{pattern} has {mixer.heads} heads at width {layout.dim}, and {other.heads} at width {base.dim}"
            fix = "scale the number of heads with the width, so that heads have one width"
            problems.append(config.problem(KEY, why, fix))
    if problems:
        raise UserError(*problems)
