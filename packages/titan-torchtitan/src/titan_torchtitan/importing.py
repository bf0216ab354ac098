"""From a TorchTitan recipe to a Titan recipe."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from titan_torchtitan.outcome import Entry, ImportOutcome
from titan_torchtitan.reading import OldRecipe
from titan_torchtitan.rules import RULES, holds
from titan_torchtitan.values import DECIDE


def import_recipe(
    old: OldRecipe, models: Collection[str], datasets: Collection[str] = (), optimizers: Collection[str] = ()
) -> ImportOutcome:
    """Return the Titan recipe that trains what ``old`` trains, and what became of each key.

    Args:
        old: the TorchTitan recipe.
        models: the models of the installed plugins.
        datasets: their datasets. Those that TorchTitan has are known without.
        optimizers: their optimizers, likewise.

    Raises:
        UserError: Titan has no such model.
    """
    outcome = ImportOutcome(old, models, datasets, optimizers)
    for key, value in outcome.asked.items():
        _apply(outcome, key, value)
    outcome.set("optimizer.param_groups", {"optimizer.param_groups": []}, "TorchTitan decays every parameter, also norms")
    if outcome.asked.get("metrics.enable_wandb"):
        why = "TorchTitan's default; it read the variable WANDB_PROJECT"
        outcome.set("metrics.wandb_project", {"metrics.wandb_project": "torchtitan"}, why)
    why = "not a key of TorchTitan: perhaps of a fork, or of a custom config module"
    outcome.entries += [Entry("unknown", name, value, why=why) for name, value in old.unknown.items()]
    return outcome


def _apply(outcome: ImportOutcome, key: str, value: Any) -> None:
    rule = RULES[key]
    if rule.ignore:
        outcome.ignore(key, rule.ignore)
    elif value == "" or (rule.refuse and (not value or value == rule.unless)):
        outcome.ignore(key, "requests nothing")
    elif not holds(rule.when, outcome.asked):
        outcome.ignore(key, f"no effect without {rule.when}")
    elif rule.refuse:
        outcome.refuse(key, rule.refuse)
    elif rule.by:
        DECIDE[key](outcome, key, value)
    else:
        outcome.set(key, {rule.to: value})
