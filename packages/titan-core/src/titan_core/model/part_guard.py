"""Check that no transform drops or replaces the settings of another on a model part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titan_core.api import Component, ModelPart, ObjectiveFunction, Problem, Registry, UserError
from titan_core.api.model.layout import flaw_of_shapes
from titan_core.api.plugins.errors import shown
from titan_core.toolkit.errors import nearest

_REMEDY = "switch one of the two off, or make the later one extend the existing setting"


class PartGuard:
    """Watches parts while transforms are applied to them."""

    def __init__(self, registry: Registry) -> None:
        self._set_by: dict[str, str] = {}
        self._slots = {slot.name: slot for component in registry.all(Component) for slot in component.reads}
        self._packages = {module.__name__.partition(".")[0] for module, _ in registry.modules()}

    def apply(
        self, name: str, transform: Callable[[ModelPart], ModelPart | Sequence[ModelPart]], part: ModelPart
    ) -> list[ModelPart]:
        """Return the parts that transform ``name`` makes of ``part``.

        Raises:
            UserError: it dropped or replaced a setting of an earlier transform.
        """
        before = _settings(part)
        parts = parts_of(name, transform(part))
        problems = {}
        for made in parts:
            self._accept(name, made, before)
            after = _settings(made)
            for setting in before:
                if not self._kept(setting, before[setting], after.get(setting), made):
                    problems[setting] = self._problem(name, setting)
            for setting in after:
                if setting not in problems and after[setting] != before.get(setting):
                    self._set_by[setting] = name
        if problems:
            raise UserError(*problems.values())
        return parts

    def _accept(self, name: str, part: ModelPart, before: Mapping[str, Any]) -> None:
        """Let the readers of slots accept what transform ``name`` has added.

        Raises:
            UserError: a value is not what the slot is for, or nobody declares the slot.
        """
        where = f"transform {name!r}"
        for slot, entries in part.slots.items():
            known = before.get(_entries_of(slot), {})
            added = [module for module, value in entries.items() if known.get(module) is not value]
            declared, package = self._slots.get(slot), slot.partition(".")[0]
            if added and declared is None and package in self._packages:
                why = f"it fills the slot {slot!r}, which {package} does not have"
                raise UserError.one(where, why, nearest(slot, [one for one in self._slots if one.startswith(f"{package}.")]))
            if declared is None or declared.accepts is None:
                continue
            for module in added:
                try:
                    entries[module] = declared.accepts.load()(entries[module])
                except TypeError as error:
                    why = f"what it leaves in the slot {slot!r} for module {module!r} is wrong: {error}"
                    raise UserError.one(where, why, "fix the plugin") from None

    def _kept(self, setting: str, before: Any, after: Any, part: ModelPart) -> bool:
        if after is before or not before:
            return True
        if setting == "vocabulary":
            return before.group is None  # the whole vocabulary, set by the core
        if setting == "objective":
            return before in part.wrapped_objectives
        if isinstance(before, tuple):
            return all(entry in after for entry in before)
        if isinstance(before, dict):
            kept = part.present(before)  # a pipeline stage keeps only the entries of its modules
            return all((after or {}).get(name) is before[name] for name in kept)
        return bool(after == before)

    def _problem(self, name: str, setting: str) -> Problem:
        owner = self._set_by.get(setting)
        set_by = f"transform {owner!r} had set" if owner else "was set"
        return Problem(f"transform {name!r}", f"it drops or replaces the part's {setting} that {set_by}", _REMEDY)


def parts_of(name: str, result: Any) -> list[ModelPart]:
    """Return the parts that ``apply`` of transform ``name`` returned.

    Raises:
        UserError: it returned something else, or left on a part what cannot be right.
    """
    parts = [result] if isinstance(result, ModelPart) else result
    if not (isinstance(parts, list | tuple) and parts and all(isinstance(one, ModelPart) for one in parts)):
        why = f"apply returned {shown(result)}; it must return the ModelPart, or a list of ModelParts"
        raise UserError.one(f"transform {name!r}", why, "fix the plugin")
    if flaw := next(filter(None, map(_flaw_of, parts)), ""):
        raise UserError.one(f"transform {name!r}", f"apply left {flaw}", "fix the plugin")
    return list(parts)


def _flaw_of(part: ModelPart) -> str:
    """Return what is wrong with what a transform has left on ``part``; empty if nothing is."""
    names = {name for name, _ in part.module.named_parameters(remove_duplicate=False)}
    if not (isinstance(part.copies, Mapping) and set(part.copies) <= names):
        return f"copies = {shown(part.copies)}; they must name parameters of the part"
    if not isinstance(part.objective, ObjectiveFunction):
        return f"objective = {shown(part.objective)}; it must be an ObjectiveFunction"
    return flaw_of_shapes(part.statistics)


def _settings(part: ModelPart) -> dict[str, Any]:
    return {
        "objective": part.objective,
        "vocabulary": part.vocabulary,
        "auxiliary_losses": part.auxiliary_losses,
        "batch_transforms": part.batch_transforms,
        "statistics": tuple(part.statistics.items()),
        "copies": tuple(part.copies.items()),
        "parameters_on": part.parameters_on,
        "saved_operators": part.saved_operators,
        "after_evaluation": part.after_evaluation,
        "weights_changed": part.weights_changed,
        "attention_masks": part.attention_masks,
        **{_entries_of(slot): dict(entries) for slot, entries in part.slots.items()},
    }


def _entries_of(slot: str) -> str:
    return f"entries of {slot}"
