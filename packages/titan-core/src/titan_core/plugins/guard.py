"""Guarded calls into plugins: any exception is reported with the plugin's name and a fix."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NoReturn

from titan_core.api.errors import PluginFailure, Problem, RunStopped, UserError

ResultCheck = Callable[["Origin", Any], Any]
"""Checks the result of a plugin's function and returns the value that the core uses. Raises :class:`WrongResult`."""

PASSED_ON = (UserError, RunStopped, BrokenPipeError)
"""Errors that a plugin raises on purpose, or because its output is no longer read. KeyboardInterrupt passes too, because it
is not an ``Exception``."""
CONCERN_FILES = ("run", "find_model")
"""Functions of a component that work on files that the user names. Their OSErrors propagate."""
MOST_PROBLEMS = 1000
"""Limit for the problems of one check, which may be an endless generator."""


class WrongResult(Exception):
    """The reason why a result is unusable, such as ``"returned 3; it must return True or False"``."""


@dataclass(frozen=True)
class Origin:
    """The plugin and component whose code is called. References carry it to other processes."""

    plugin: str
    distribution: str
    version: str
    component: str = ""
    """Such as ``model 'mine'``; empty for the plugin's own lifecycle hooks."""
    removable: bool = True
    """Whether the plugin can be switched off; the core's own cannot."""

    def __str__(self) -> str:
        name = f"plugin {self.plugin!r} ({self.distribution} {self.version})"
        return f"{name}: {self.component}" if self.component else name

    def failure(self, why: str) -> PluginFailure:
        """Return the error that names the plugin, the reason ``why`` and a fix."""
        hint = f"fix or update {self.distribution}"
        if self.removable:
            hint += f', or switch the plugin off with [plugins] disable = ["{self.plugin}"]'
        return PluginFailure(Problem(str(self), why, f"{hint} (TITAN_TRACEBACK=1 shows the traceback)"))

    def call(
        self, what: str, function: Callable[..., Any], arguments: Iterable[Any], check: ResultCheck | None = None
    ) -> Any:
        """Return ``function(*arguments)``, passed through ``check``.

        Args:
            what: the function's name, for errors.

        Raises:
            PluginFailure: the function raised, or its result is unusable. Errors in :data:`PASSED_ON` propagate unchanged.
        """
        try:
            result = function(*arguments)
            return result if check is None else check(self, result)
        except PASSED_ON:
            raise
        except WrongResult as error:
            raise self.failure(f"{what} {error}") from None
        except OSError as error:
            if what in CONCERN_FILES:
                raise
            self._raised(what, error)
        except SystemExit as error:
            if what == "run":  # a command may exit
                raise
            self._raised(what, error)
        except Exception as error:  # noqa: BLE001 - raised again, with the plugin's name
            self._raised(what, error)

    def guard(self, what: str, function: Callable[..., Any], check: ResultCheck | None = None) -> Callable[..., Any]:
        """Return ``function`` wrapped in :meth:`call`."""

        def guarded(*arguments: Any) -> Any:
            return self.call(what, function, arguments, check)

        return guarded

    def guard_ref(self, purpose: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, the target of a component's field ``purpose``, wrapped in :meth:`call`."""
        return self.guard(purpose, function, RESULT_CHECKS.get(purpose))

    def guard_wrapper(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper hook guarded like :meth:`guard`. Errors of the hooks that it wraps pass through unchanged."""

        def guarded(*arguments: Any) -> Generator[Any, Any, Any]:
            generator = self.call(what, function, arguments)
            self.call(what, next, (generator,))
            thrown: BaseException | None = None
            try:
                outcome = yield
            except BaseException as error:  # noqa: BLE001 - passed to the hook, which raises it again
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
            raise self.failure(f"{what} yielded more than once")

        return guarded

    def _raised(self, what: str, error: BaseException) -> NoReturn:
        message = " ".join(str(error).split())
        raise self.failure(f"{what} raised {type(error).__name__}{': ' + message if message else ''}") from error


def checked_flag(origin: Origin, result: Any) -> bool:
    """Result of ``active``. Accepting ``None`` would silently switch the component off."""
    if not isinstance(result, bool):
        raise WrongResult(f"returned {shown(result)}; it must return True or False")
    return result


def checked_problems(origin: Origin, result: Any) -> list[Problem]:
    """Result of ``check`` and ``hardware``. Generators are exhausted here, where their exceptions are caught."""
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise WrongResult(f"returned {shown(result)}; it must return or yield Problems (none if all is well)")
    problems = list(islice(result, MOST_PROBLEMS))
    for problem in problems:
        if not isinstance(problem, Problem):
            raise WrongResult(f"found {shown(problem)}; it must return or yield Problems")
    return problems


def checked_object(origin: Origin, result: Any) -> Any:
    """Result of a function that builds something."""
    if result is None:
        raise WrongResult("returned None; it must return the object that it builds")
    return result


def checked_definition(origin: Origin, result: Any) -> Any:
    """Result of ``define``; the functions of the definition are guarded too."""
    from titan_core.api.layout import ModelDefinition

    if not isinstance(result, ModelDefinition):
        raise WrongResult(f"returned {shown(result)}; it must return a ModelDefinition")
    return replace(
        result,
        build=origin.guard("its definition's build", result.build, checked_object),
        flops_per_token=origin.guard("its definition's flops_per_token", result.flops_per_token),
    )


def checked_parts(origin: Origin, result: Any) -> Any:
    """Result of ``apply``: one model part or several."""
    from titan_core.api.model_part import ModelPart

    if isinstance(result, ModelPart):
        return result
    if not isinstance(result, list | tuple) or not all(isinstance(part, ModelPart) for part in result):
        raise WrongResult(f"returned {shown(result)}; it must return the ModelPart, or a list of ModelParts")
    return result


RESULT_CHECKS: dict[str, ResultCheck] = {
    "active": checked_flag,
    "check": checked_problems,
    "hardware": checked_problems,
    "define": checked_definition,
    "apply": checked_parts,
    "build": checked_object,
    "step": checked_object,
    "observe": checked_object,
}
"""Name of a component's field -> the check of its function's result."""


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message, or the name of its class if that is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
