"""Errors that a user can fix, each reported in one line (where, why and the fix), and the exit statuses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from titan_core.api.tools.shown import printable

EXIT_FAILURE: Final = 1
EXIT_USER_ERROR: Final = 2
EXIT_NUMERICS: Final = 65
"""A guard of the numerics ended the run (``EX_DATAERR`` of ``sysexits.h``, like the following)."""
EXIT_DATA_ENDED: Final = 66
"""The data ended before the last step (``EX_NOINPUT``)."""
EXIT_LOST_PEER: Final = 69
"""Another rank has vanished or did not answer (``EX_UNAVAILABLE``)."""
EXIT_OUT_OF_MEMORY: Final = 71
"""The host or a device has too little memory (``EX_OSERR``)."""
EXIT_HARDWARE: Final = 74
"""A device or the network between devices failed (``EX_IOERR``)."""
EXIT_PREEMPTED: Final = 75
"""``EX_TEMPFAIL``, a temporary failure: launchers and schedulers retry the job."""
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
        return printable(" ".join(line.split()))  # names in files of others may contain what a terminal obeys


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
    message without a traceback and exits with :attr:`exit_status`."""

    exit_status: int = EXIT_FAILURE


class NumericsStop(RunStopped):
    """A guard ended the run because its numbers are bad. A restart would meet the same numbers again."""

    exit_status = EXIT_NUMERICS


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


class Interrupted(BaseException):
    """Raised by a signal handler, wherever the process is. It says nothing about the code that it interrupts, so whoever
    calls plugins lets it pass."""


class PartOfContract(Exception):
    """An exception by which a plugin's function says something to the core, as its documentation states. All others are
    failures of the plugin."""


class PluginFailure(UserError):
    """A plugin's code raised an exception that is not meant for users, or returned a wrong result. The original exception is
    the ``__cause__``."""
