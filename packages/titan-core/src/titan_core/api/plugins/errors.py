"""Errors that a user can fix, each reported in one line (where, why and the fix), and the exit statuses."""

from __future__ import annotations

from dataclasses import dataclass

from titan_core.api._shown import printable


@dataclass(frozen=True)
class Problem:
    """One mistake. ``where`` names the file, key and value (or the plugin), ``why`` says what is wrong, and ``fix`` says how
    to fix it."""

    where: str
    """The file, key and value, or the plugin; empty if ``why`` says it."""
    why: str
    """What is wrong, in a clause that follows ``where`` and a colon."""
    fix: str = ""
    """What to do about it, as an imperative; empty if nothing can be advised."""
    missing: bool = False
    """Whether the config may be right, and only this machine lacks something that the job needs where it trains, such as a
    file. Commands that only look at a job report it as a note (:attr:`.AssembledJob.missing`)."""

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

    exit_status: int = 1
    """Exit status of the process."""


class PartOfContract(Exception):
    """An exception by which a plugin's function says something to the core, as its documentation states. All others are
    failures of the plugin."""


class PluginFailure(UserError):
    """A plugin's code raised an exception that is not meant for users, or returned a wrong result. The original exception is
    the ``__cause__``."""


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message, or the name of its class if that is long or fails. Of a tensor, which may be in
    flight, its form."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {type(value).__name__.lower()} {list(value.shape)} of {value.dtype}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of an object of a plugin, which is being reported
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"a {type(value).__name__}"
