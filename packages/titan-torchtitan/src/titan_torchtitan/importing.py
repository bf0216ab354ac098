"""From a TorchTitan recipe to a Titan recipe."""

from __future__ import annotations

from collections.abc import Collection

from titan_torchtitan.data import import_data
from titan_torchtitan.float8 import import_low_precision
from titan_torchtitan.model import import_model
from titan_torchtitan.optimization import import_optimization
from titan_torchtitan.outcome import ImportOutcome
from titan_torchtitan.parallelism import import_parallelism
from titan_torchtitan.reading import OldRecipe
from titan_torchtitan.saving import import_saving


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
    outcome = ImportOutcome(old)
    import_model(outcome, models)
    import_data(outcome, datasets)
    import_optimization(outcome, optimizers)
    import_parallelism(outcome)
    import_low_precision(outcome)
    import_saving(outcome)
    outcome.close()
    return outcome
