"""``[optimizer]``, ``[lr_scheduler]``, ``[training]`` steps and ``[debug]``."""

from __future__ import annotations

from collections.abc import Collection

from titan_torchtitan.outcome import ImportOutcome

_STEPS = 10_000
"""TorchTitan's default of ``training.steps``."""


def import_optimization(outcome: ImportOutcome, installed: Collection[str]) -> None:
    """Import the optimizer, its schedule, the number of steps and the seed.

    Args:
        installed: the optimizers of the installed plugins.
    """
    old = outcome.old
    name = old.get("optimizer.name", "AdamW")
    if name in ("Adam", "AdamW"):
        outcome.keep("optimizer.name")
    elif name in installed:
        outcome.keep("optimizer.name", why="the optimizer of an installed plugin; compare its keys")
    else:
        why = "no optimizer of TorchTitan or of an installed plugin: set Adam or AdamW, or write a plugin (docs/plugins.md)"
        outcome.refuse("optimizer.name", why, {"optimizer.name": name})
    outcome.keep(*(f"optimizer.{name}" for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "implementation")))
    outcome.default("optimizer.param_groups", [], "TorchTitan decays every parameter, also norms")
    if old.get("optimizer.early_step_in_backward"):
        outcome.refuse("optimizer.early_step_in_backward", "Titan updates after backward, when the gradient norm is known")
    outcome.ignore("off", "optimizer.early_step_in_backward")
    outcome.keep("training.max_norm")
    outcome.keep(*(f"lr_scheduler.{name}" for name in ("warmup_steps", "decay_ratio", "decay_type", "min_lr_factor")))
    _steps(outcome)
    outcome.keep("training.gc_freq")
    outcome.ignore("a diagnosis of Python's collector that Titan does not offer", "training.gc_debug")
    if old.get("debug.seed", 0) < 0:
        outcome.refuse("debug.seed", "a seed is at least 0: set training.seed")
    else:
        outcome.set("debug.seed", {"training.seed": old.get("debug.seed")})
    outcome.set("debug.deterministic", {"training.deterministic": old.get("debug.deterministic")})
    outcome.ignore("Titan refuses operators that are not deterministic", "debug.deterministic_warn_only")
    outcome.ignore("the model has no experts", "debug.moe_force_load_balance")


def _steps(outcome: ImportOutcome) -> None:
    old = outcome.old
    steps = old.get("training.steps", _STEPS)
    total = old.get("lr_scheduler.total_steps", steps)
    if total > steps:
        why = "the schedule is that of lr_scheduler.total_steps, and the run ends before"
        outcome.set("lr_scheduler.total_steps", {"training.steps": total}, why)
        if old.has("training.steps"):
            outcome.set("training.steps", {"training.stop_at_step": steps}, why)
        else:
            outcome.default("training.stop_at_step", steps)
        return
    outcome.keep("training.steps")
    if not old.has("training.steps"):
        outcome.default("training.steps", _STEPS)
    if total < steps:
        outcome.refuse("lr_scheduler.total_steps", "Titan's schedule ends with training.steps: set both to one number")
    outcome.ignore("equals training.steps", "lr_scheduler.total_steps")
