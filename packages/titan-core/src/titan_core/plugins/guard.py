"""Guarded calls into plugins: any exception is reported with the plugin's name and a fix."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from titan_core.api import Problem, RunStopped, UserError
from titan_core.api.plugins.errors import PartOfContract
from titan_core.api.plugins.ref import CodeOrigin
from titan_core.plugins.guarded_object import WrongResult
from titan_core.plugins.results import RETURNS
from titan_core.toolkit.errors import (
    EXIT_HARDWARE,
    EXIT_LOST_PEER,
    EXIT_OUT_OF_MEMORY,
    Interrupted,
    PluginFailure,
    exit_status,
    locale_error,
)
from titan_core.toolkit.open_files import is_too_many_files, too_many_files
from titan_core.toolkit.reading import is_transient

ResultCheck = Callable[[CodeOrigin, Any], Any]
"""See :data:`titan_core.plugins.guarded_object.Check`."""

PASSED_ON = (UserError, RunStopped, PartOfContract, Interrupted, KeyboardInterrupt, GeneratorExit)
"""Exceptions that a plugin raises on purpose, or that are not about it, such as an interrupt."""
PASSED_ON_BY: Mapping[str, tuple[type[BaseException], ...]] = {
    "run": (OSError, SystemExit),  # a command may exit, and works on files that the user names
    "find_model": (OSError,),
    "to_args": (ValueError,),
    "accepts": (TypeError,),
    "__next__": (StopIteration,),
}
"""Function -> exceptions that belong to its contract."""
NOT_ABOUT_CODE = (EXIT_LOST_PEER, EXIT_OUT_OF_MEMORY, EXIT_HARDWARE)
"""Exit statuses of exceptions that say something about the machine or another rank, not about the code that met them."""


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
        self,
        what: str,
        function: Callable[..., Any],
        arguments: Iterable[Any] = (),
        check: ResultCheck | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return ``function(*arguments, **keywords)``, passed through ``check``.

        Args:
            what: the function's name, for errors.

        Raises:
            PluginFailure: the function raised, or its result is unusable. Exceptions that belong to its contract, or say
                nothing about the plugin, propagate unchanged.
        """
        try:
            result = function(*arguments, **keywords) if keywords else function(*arguments)
            return result if check is None else check(self, result)
        except WrongResult as error:
            raise self.failure(f"{what} {error}") from None
        except BaseException as error:
            if self._passes(what, error):
                raise
            self._raised(what, error)

    def guard(self, what: str, function: Callable[..., Any], check: ResultCheck | None = None) -> Callable[..., Any]:
        """Return ``function`` wrapped in :meth:`call`."""

        def guarded(*arguments: Any, **keywords: Any) -> Any:
            return self.call(what, function, arguments, check, keywords)

        return guarded

    def guard_ref(self, row: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, the target of a reference in field ``row`` (:data:`RETURNS`), wrapped in :meth:`call`."""
        return self.guard(row.partition(".")[2], function, RETURNS[row])

    def guard_hook(self, hook: str, function: Callable[..., Any], wraps: bool) -> Callable[..., Any]:
        """Return a lifecycle hook wrapped in :meth:`call`.

        Args:
            wraps: whether it is a generator that wraps other hooks. Their errors pass through it unchanged.
        """
        return self.guard_wrapper(hook, function) if wraps else self.guard(hook, function, RETURNS[hook])

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
            except BaseException as error:
                if error is thrown or self._passes(what, error):
                    raise
                self._raised(what, error)
            raise self.failure(f"{what} yielded more than once")

        return guarded

    def _passes(self, what: str, error: BaseException) -> bool:
        if isinstance(error, (*PASSED_ON, *PASSED_ON_BY.get(what, ()))):
            return True
        if what == "__next__" and isinstance(error, Exception) and is_transient(error):
            return True  # read again
        return exit_status(error) in NOT_ABOUT_CODE

    def _raised(self, what: str, error: BaseException) -> NoReturn:
        if is_too_many_files(error):  # says something about the machine, not about the plugin
            raise too_many_files(f"{self}: {what}") from error
        if (mistake := locale_error(error)) is not None:
            raise mistake from error
        message = " ".join(str(error).split())
        raise self.failure(f"{what} raised {type(error).__name__}{': ' + message if message else ''}") from error
