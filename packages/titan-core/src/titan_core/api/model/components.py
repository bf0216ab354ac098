"""The kind of component that describes a model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from titan_core.api.model.weights import WeightFormat
from titan_core.api.plugins.component import Component
from titan_core.api.plugins.ref import Ref

if TYPE_CHECKING:
    from titan_core.api.model.layout import ModelDefinition


@dataclass(frozen=True, kw_only=True)
class Model(Component):
    """A model family."""

    kind = "model"
    keys = ("model.name",)
    flavors: Mapping[str, BaseModel]
    """Flavor name -> model arguments. All flavors share one pydantic class; ``[model.args]`` overrides single fields."""
    define: Ref[Callable[[Any], ModelDefinition]]
    """Model arguments -> definition. Must not import torch."""
    formats: tuple[WeightFormat, ...] = ()
    """Other formats from which the weights can be read, or to which they can be written."""
    training_only: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that add what only training uses -> the value that adds nothing. A job that sets this value may start from
    weights with another one: what they have in addition is not loaded."""
    default: bool = True
    """Whether a config that names no model uses this one if it is the only such model that is installed. Not so a model for
    tests or demonstrations, beside which a user has one of their own."""
