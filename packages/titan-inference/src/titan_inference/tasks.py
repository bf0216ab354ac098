"""Names and scores of lm-eval's tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from lm_eval.tasks import TaskManager

from titan_core.api import Problem, UserError
from titan_core.toolkit.errors import close_names


def tasks_of(names: Collection[str], folder: str | None, where: Callable[[str], str], option: str) -> TaskManager:
    """Return the tasks of lm-eval, which include ``names``.

    Args:
        folder: with further tasks. If it has all of ``names``, the thousands that come with lm-eval are not read.
        where: name of a task -> its origin, for the error.
        option: what sets the folder, for the error.

    Raises:
        UserError: lm-eval has no task of a name. Lists all of them.
    """
    if folder is not None:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if all(manager.match_tasks([name]) for name in names):
            return manager
    manager = TaskManager(include_path=folder)
    problems = []
    for name in names:
        if not manager.match_tasks([name]):
            close = " or ".join(map(repr, close_names(name, manager.all_tasks)))
            fix = f"did you mean {close}?" if close else f"see lm-eval's list of tasks, or set {option}"
            problems.append(Problem(where(name), "is not a task of lm-eval", fix))
    if problems:
        raise UserError(*problems)
    return manager


def scores_in(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of the only task in ``results``: ``acc``, ``acc_stderr`` ...; those of the tasks of a group are
    named after them."""
    found: dict[str, float] = {}
    tasks: Mapping[str, Mapping[str, Any]] = results["results"]
    for number, (task, metrics) in enumerate(tasks.items()):
        for metric, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and metric != "sample_len":
                name = metric.removesuffix(",none").replace(",", "_")
                found[name if number == 0 else f"{task}/{name}"] = float(value)
    return found
