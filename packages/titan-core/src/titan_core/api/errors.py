"""Errors that a user can fix, reported in one line each (what, where, why, how to fix it), and the exit statuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

EXIT_FAILURE: Final = 1
EXIT_USER_ERROR: Final = 2
EXIT_PREEMPTED: Final = 75
"""As ``sysexits.h`` has it for a failure that passes (EX_TEMPFAIL): launchers and schedulers retry the job."""
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141


@dataclass(frozen=True)
class Problem:
    """One mistake. ``where`` names the file, the key and the value (or the plugin), ``why`` the reason,
    ``fix`` what to do next."""

    where: str
    why: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.where}: {self.why}" if self.where else self.why
        if self.fix:
            line += f"; {self.fix}"
        return " ".join(line.split())


class UserError(Exception):
    """A mistake of the user's, or of a plugin they installed. The command line prints its problems, one line each and
    without a traceback, and exits with status 2."""

    def __init__(self, *problems: Problem) -> None:
        if not problems:
            raise ValueError("a UserError needs at least one problem")
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems

    @classmethod
    def one(cls, where: str, why: str, fix: str = "") -> UserError:
        """An error of a single problem."""
        return cls(Problem(where, why, fix))


class RunStopped(RuntimeError):
    """An observer ended the run, because of what the run has come to and not of a mistake in its config: the command line
    prints its message without a traceback, and exits with status 1."""


def nearest(word: str, known: list[str]) -> str:
    """'did you mean ...?' for a misspelt ``word``, or the list of what there is."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    words = set(word.split("_"))
    shorter = max((one for one in known if set(one.split("_")) < words), key=len, default="")
    if shorter and not get_close_matches(word, known, n=1, cutoff=0.8):
        close = [shorter]  # "enable_checkpoint" is an older name of "enable"
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there is {', '.join(sorted(known))}" if known else "there is none"


class PluginFailure(UserError):
    """A plugin's code raised an exception that is not for users, or returned the wrong thing. What it raised is the
    ``__cause__``."""
