"""Calling a plugin's code. Whatever it raises is reported with the plugin's name and what to do about it, in one place."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NoReturn

from titan_core.api.errors import PluginFailure, Problem, RunStopped, UserError

Take = Callable[["Origin", Any], Any]
"""Looks at what a plugin's function returned, and returns what the core uses. Raises :class:`WrongResult`."""

PASSED_ON = (UserError, RunStopped, BrokenPipeError)
"""What a plugin raises on purpose, or because nobody reads the output. KeyboardInterrupt passes too, since it is no
``Exception``."""
MOST_PROBLEMS = 1000
"""How many problems a check may find: a generator may be endless."""


class WrongResult(Exception):
    """Why what a plugin's function returned cannot be used: ``"returned 3; return True or False"``."""


@dataclass(frozen=True)
class Origin:
    """Whose code is called. It travels to other processes with the references that hold it."""

    plugin: str
    distribution: str
    version: str
    component: str = ""
    """Such as ``model 'mine'``; empty for the plugin's own lifecycle hooks."""
    removable: bool = True
    """Whether the plugin can be switched off, which the core's own cannot."""

    def __str__(self) -> str:
        name = f"plugin {self.plugin!r} ({self.distribution} {self.version})"
        return f"{name}: {self.component}" if self.component else name

    def failure(self, why: str) -> PluginFailure:
        """The error that says so, and what to do."""
        hint = f"fix or update {self.distribution}"
        if self.removable:
            hint += f', or switch the plugin off with [plugins] disable = ["{self.plugin}"]'
        return PluginFailure(Problem(str(self), why, f"{hint} (TITAN_TRACEBACK=1 shows the traceback)"))

    def call(self, what: str, function: Callable[..., Any], arguments: Iterable[Any], take: Take | None = None) -> Any:
        """``function(*arguments)``, as ``take`` returns it.

        Args:
            what: the function's name, for an error.

        Raises:
            PluginFailure: the function raised, or returned the wrong thing. Errors in :data:`PASSED_ON` are passed on.
        """
        try:
            result = function(*arguments)
            return result if take is None else take(self, result)
        except PASSED_ON:
            raise
        except WrongResult as error:
            raise self.failure(f"{what} {error}") from None
        except (OSError, SystemExit) as error:
            if what == "run":  # a command's: it may exit, and the files that it was given are the user's
                raise
            self._raised(what, error)
        except Exception as error:  # noqa: BLE001 - raised again, with the plugin's name
            self._raised(what, error)

    def guard(self, what: str, function: Callable[..., Any], take: Take | None = None) -> Callable[..., Any]:
        """``function``, called by :meth:`call`."""

        def guarded(*arguments: Any) -> Any:
            return self.call(what, function, arguments, take)

        return guarded

    def guard_ref(self, purpose: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, to which a component's field ``purpose`` refers, called by :meth:`call`."""
        return self.guard(purpose, function, TAKES.get(purpose))

    def guard_wrapper(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a hook that wraps the others': what those raise passes through it, and is not its own failure."""

        def guarded(*arguments: Any) -> Generator[Any, Any, Any]:
            generator = self.call(what, function, arguments)
            self.call(what, next, (generator,))
            thrown: BaseException | None = None
            try:
                outcome = yield
            except BaseException as error:  # noqa: BLE001 - handed to the hook, which raises it again
                thrown = error
            try:
                generator.send(outcome) if thrown is None else generator.throw(thrown)
            except StopIteration as end:
                return end.value
            except PASSED_ON:
                raise
            except Exception as error:
                if error is thrown:
                    raise
                self._raised(what, error)
            raise self.failure(f"{what} yields more than once")

        return guarded

    def _raised(self, what: str, error: BaseException) -> NoReturn:
        message = " ".join(str(error).split())
        raise self.failure(f"{what} raised {type(error).__name__}{': ' + message if message else ''}") from error


def take_flag(origin: Origin, result: Any) -> bool:
    """Of ``active``. One that returns nothing would silently switch its component off."""
    if not isinstance(result, bool):
        raise WrongResult(f"returned {shown(result)}; it must return True or False")
    return result


def take_problems(origin: Origin, result: Any) -> list[Problem]:
    """Of ``check`` and ``hardware``; a generator is run to its end here, where its exceptions are caught."""
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise WrongResult(f"returned {shown(result)}; it must return or yield Problems (none where all is well)")
    problems = list(islice(result, MOST_PROBLEMS))
    for one in problems:
        if not isinstance(one, Problem):
            raise WrongResult(f"found {shown(one)}; it must return or yield Problems")
    return problems


def take_something(origin: Origin, result: Any) -> Any:
    """Of what builds a thing: it must not be ``None``."""
    if result is None:
        raise WrongResult("returned None; it must return what it builds")
    return result


def take_definition(origin: Origin, result: Any) -> Any:
    """Of ``define``: a definition, whose own functions are guarded from here on."""
    from titan_core.api.layout import ModelDefinition

    if not isinstance(result, ModelDefinition):
        raise WrongResult(f"returned {shown(result)}; it must return a ModelDefinition")
    return replace(
        result,
        build=origin.guard("its definition's build", result.build, take_something),
        flops_per_token=origin.guard("its definition's flops_per_token", result.flops_per_token),
    )


def take_parts(origin: Origin, result: Any) -> Any:
    """Of ``apply``: a part of a model, or several."""
    from titan_core.api.model_part import ModelPart

    if isinstance(result, ModelPart):
        return result
    if not isinstance(result, list | tuple) or not all(isinstance(one, ModelPart) for one in result):
        raise WrongResult(f"returned {shown(result)}; it must return the ModelPart, or a list of ModelParts")
    return result


TAKES: dict[str, Take] = {
    "active": take_flag,
    "check": take_problems,
    "hardware": take_problems,
    "define": take_definition,
    "apply": take_parts,
    "build": take_something,
    "step": take_something,
    "observe": take_something,
}
"""By the name of a component's field."""


def shown(value: object) -> str:
    """``value`` in a message about a plugin: as Python writes it, or by its class where that is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
