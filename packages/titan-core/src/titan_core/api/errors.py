"""Errors that a user can fix, each reported in one line (where, why and the fix), and the exit statuses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

EXIT_FAILURE: Final = 1
EXIT_USER_ERROR: Final = 2
EXIT_PREEMPTED: Final = 75
"""``EX_TEMPFAIL`` of ``sysexits.h``, a temporary failure: launchers and schedulers retry the job."""
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

MOST_SUGGESTED: Final = 3
"""Maximum number of names that an error suggests."""


@dataclass(frozen=True)
class Problem:
    """One mistake. ``where`` names the file, key and value (or the plugin), ``why`` says what is wrong, and ``fix`` says how
    to fix it."""

    where: str
    why: str
    fix: str = ""
    missing: bool = False
    """Whether the config may be right, and only this machine lacks something that the job needs where it trains, such as a
    file. Commands that only look at a job report it as a note (:attr:`titan_core.api.job.Job.missing`)."""

    def __str__(self) -> str:
        line = f"{self.where}: {self.why}" if self.where else self.why
        if self.fix:
            line += f"; {self.fix}"
        return " ".join(line.split())


class UserError(Exception):
    """One or more mistakes by the user, or by a plugin that they installed. The command line prints the problems, one line
    each and without a traceback, and exits with status 2."""

    def __init__(self, *problems: Problem) -> None:
        if not problems:
            raise ValueError("a UserError needs at least one problem")
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems

    @classmethod
    def one(cls, where: str, why: str, fix: str = "", missing: bool = False) -> UserError:
        """Return an error with a single problem."""
        return cls(Problem(where, why, fix, missing))


class RunStopped(RuntimeError):
    """An observer ended the run because of its state, not because of a mistake in the config. The command line prints the
    message without a traceback and exits with status 1."""


def nearest(word: str, known: list[str]) -> str:
    """Return "did you mean ...?" for a misspelt ``word``, or a list of the ``known`` words."""
    close = close_names(word, known)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"available: {', '.join(sorted(known))}" if known else "none is available"


def close_names(word: str, known: Iterable[str]) -> list[str]:
    """Return the names that a misspelt ``word`` may stand for: one, a few that contain it, or none.

    Upper and lower case, dashes and underscores are the same.
    """
    from difflib import get_close_matches

    names: dict[str, str] = {}
    for name in known:
        names.setdefault(_folded(name), name)
    wanted = _folded(word)
    if wanted in names:
        return [names[wanted]]
    begun = [name for name in names if name.startswith(f"{wanted}_")]  # "tiny_1m" of "tiny_1m_laptop"
    if 0 < len(begun) <= MOST_SUGGESTED:
        return [names[name] for name in begun]
    certain = get_close_matches(wanted, names, n=1, cutoff=0.8)
    if certain:
        return [names[certain[0]]]
    parts = {name: set(name.split("_")) for name in names}
    words = set(wanted.split("_"))
    shorter = [name for name in names if parts[name] < words]  # "enable_checkpoint" is an older name of "enable"
    if shorter:
        return [names[max(shorter, key=len)]]
    longer = [name for name in names if words < parts[name]]  # "batch_size" may be the local or the global one
    if not 0 < len(longer) <= MOST_SUGGESTED:
        longer = get_close_matches(wanted, names, n=1, cutoff=0.7)
    return [names[name] for name in longer]


def _folded(name: str) -> str:
    return name.casefold().replace("-", "_")


class PluginFailure(UserError):
    """A plugin's code raised an exception that is not meant for users, or returned a wrong result. The original exception is
    the ``__cause__``."""
