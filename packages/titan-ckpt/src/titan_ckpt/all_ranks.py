"""Work that ranks do apart, and that must end alike on all of them: no rank waits for one that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from titan_core.api import UserError, World
from titan_core.api.parallel.tree import portable

T = TypeVar("T")


def on_all_ranks(work: Callable[[], T], world: World, expected: tuple[type[Exception], ...] = ()) -> tuple[T | None, str]:
    """Call ``work`` on all ranks. Collective, unlike ``work``.

    Args:
        expected: exceptions after which the caller continues.

    Returns:
        This rank's result, and why a rank raised one of the ``expected``, the same on all ranks; ``""`` if none did.

    Raises:
        UserError: the mistakes of all ranks; on every rank.
        Exception: what else the first rank raised that did; on every rank.
    """
    result, problem = None, ""
    mistake: UserError | None = None
    failure: Exception | None = None
    try:
        result = work()
    except UserError as error:
        mistake = error
    except Exception as error:  # noqa: BLE001 - raised below, on all ranks
        if isinstance(error, expected):
            problem = str(error)
        else:
            failure = error
    world.raise_together(mistake)
    answers = world.gather((problem, None if failure is None else portable(failure)))
    for _, of_rank in answers:
        if of_rank is not None:
            raise failure or of_rank
    return result, next((problem for problem, _ in answers if problem), "")
