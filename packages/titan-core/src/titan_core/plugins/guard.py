"""Errors of plugins' code: each is reported in one line with the plugin's name and a fix."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from titan_core.api import Component, Problem, Ref, Registry, RunStopped, UserError
from titan_core.api.plugins.errors import PartOfContract
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

T = TypeVar("T")

_NAMED: Final = (
    "model '",
    "dataset '",
    "format '",
    "tokenizer '",
    "objective '",
    "optimizer '",
    "lr schedule '",
    "recipe '",
)
"""Kinds of components that a config selects by name: without the plugin, there is no job."""
OF_CONTRACT: Final = {
    "find_model": OSError,
    "describe_model": OSError,
    "to_args": ValueError,
    "accepts": TypeError,
    "run": BaseException,
}
"""Function -> exception by which it says something to its caller. The command line names who raised in a command."""


def is_plugins_fault(error: BaseException) -> bool:
    """Whether ``error``, raised in a plugin's code, is a failure of it: neither raised on purpose nor about the machine,
    another rank or an interrupt."""
    meant = UserError | RunStopped | PartOfContract | Interrupted | KeyboardInterrupt | GeneratorExit
    return not isinstance(error, meant) and exit_status(error) not in (EXIT_LOST_PEER, EXIT_OUT_OF_MEMORY, EXIT_HARDWARE)


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
        # Neither a file that --plugin names, nor a component that the job's config names, can be left out.
        if self.removable and not self.version.startswith("sha256:") and not self.component.startswith(_NAMED):
            hint += f', or switch the plugin off with [plugins] disable = ["{self.plugin}"]'
        return PluginFailure(Problem(str(self), why, f"{hint} (TITAN_TRACEBACK=1 shows the traceback)"))

    def call(self, what: str, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Return ``function(*arguments, **keywords)``. Errors refer to it as ``what``.

        Raises:
            PluginFailure: it raised an exception that :func:`is_plugins_fault`, and that is not part of its contract.
        """
        try:
            return function(*arguments, **keywords)
        except BaseException as error:
            if (failure := self.failure_of(what, error)) is None:
                raise
            raise failure from error

    def failure_of(self, what: str, error: BaseException) -> UserError | None:
        """Return what to raise in place of ``error``, which the function ``what`` raised; ``None``: the error itself."""
        if not is_plugins_fault(error) or isinstance(error, OF_CONTRACT.get(what, ())):
            return None
        if is_too_many_files(error):  # says something about the machine, not about the plugin
            return too_many_files(f"{self}: {what}")
        message = " ".join(str(error).split())
        why = f"{what} raised {type(error).__name__}{': ' + message if message else ''}"
        return locale_error(error) or self.failure(why)

    def guard_hook(self, hook: str, function: Callable[..., Any], wraps: bool) -> Callable[..., Any]:
        """Return a lifecycle hook whose every call goes through :meth:`call`.

        Args:
            wraps: whether it is a generator that wraps other hooks. Their errors pass through it unchanged.
        """

        def guarded(*arguments: Any) -> Any:
            return self.call(hook, function, *arguments)

        def wrapper(*arguments: Any) -> Generator[Any, Any, Any]:
            generator = guarded(*arguments)
            self.call(hook, next, generator)
            thrown: BaseException | None = None
            try:
                outcome = yield
            except BaseException as error:  # noqa: BLE001 - passed to the hook, which raises it again
                thrown, before = error, error.__traceback__
            try:
                generator.send(outcome) if thrown is None else generator.throw(thrown)
            except StopIteration as end:
                return end.value
            except BaseException as error:
                if error is thrown:
                    error.__traceback__ = before  # without the hook's frame
                    raise
                if (failure := self.failure_of(hook, error)) is None:
                    raise
                raise failure from error
            raise self.failure(f"{hook} yielded more than once")

        return wrapper if wraps else guarded


def named(error: BaseException, registry: Registry) -> BaseException:
    """Return ``error``, or the failure of the plugin in whose code it was raised: the one with the innermost frame of the
    traceback. The core's frames do not count: plugins call it, and it calls plugins."""
    if not is_plugins_fault(error):
        return error
    plugins = {module.__name__.rpartition(".")[0] or module.__name__: origin for module, origin in registry.modules()}
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_globals.get("__name__", "")
        origin = next((one for package, one in plugins.items() if f"{module}.".startswith(f"{package}.")), None)
        if not isinstance(origin, Origin) or not origin.removable:
            continue
        owners = [registry.origin(one) for one in registry.all(Component) if module in _modules_of(one)]
        owner = owners[0] if len(owners) == 1 and isinstance(owners[0], Origin) else origin
        failure = owner.failure_of(f"{frame.f_code.co_qualname} ({module}, line {line})", error)
        assert failure is not None  # it is the plugin's fault
        failure.__cause__ = error
        return failure
    return error


def _modules_of(component: Component) -> set[str]:
    """Return the modules that the references of ``component`` name."""
    return {value.target.partition(":")[0] for value in vars(component).values() if isinstance(value, Ref)}
