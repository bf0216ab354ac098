"""The lifecycle hooks as typed methods, which the trainer calls."""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

import pluggy

from titan_core.api import Record, hookspecs
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.plugins.errors import shown
from titan_core.api.plugins.ref import CodeOrigin
from titan_core.plugins.discovery import REGISTRATION_HOOKS
from titan_core.toolkit import hookspecs as toolkit_hooks
from titan_core.toolkit.hookspecs import JobFact, hook_manager
from titan_core.toolkit.plain_json import survives_json
from titan_core.toolkit.random_state import same_generators

if TYPE_CHECKING:
    from torch import Tensor

    from titan_core.api import PendingUpdate, RunEnd
    from titan_core.api.observe.events import NextCommand
    from titan_core.plugins.unchanged import Unchanged

log = logging.getLogger(__name__)
P = ParamSpec("P")

MERGED: Final = ("titan_figures", "titan_save_state", "titan_state_tensors")
"""Hooks whose answers are mappings, merged into one without equal names."""
ANSWERED: Final = (*MERGED, "titan_before_update", "titan_job_facts", "titan_next_commands")
"""Hooks whose answers the core combines. They cannot be wrapped."""
CHECKED: Final = ("titan_gradients_complete", "titan_before_update", "titan_step_end")
"""Hooks after which the tensors of the run are compared: those that see a step's tensors."""


class _Caller:
    """Stands for the owner of an observer that belongs to no plugin. Its exceptions are its caller's."""

    def __init__(self, observer: object) -> None:
        self._observer = observer

    def failure(self, why: str) -> ValueError:
        return ValueError(f"{self._observer!r}: {why}")

    def guard_hook(self, hook: str, function: Callable[..., Any], wraps: bool) -> Callable[..., Any]:
        return function


def _notification(spec: Callable[P, Any], random: bool = True) -> Callable[Concatenate[Lifecycle, P], None]:
    """Return the method that calls the hook ``spec``, whose answers are ignored. ``random``: see :meth:`Lifecycle.call`."""
    hook, names = spec.__name__, list(inspect.signature(spec).parameters)

    def call(lifecycle: Lifecycle, /, *arguments: P.args, **keywords: P.kwargs) -> None:
        lifecycle.call(hook, {**dict(zip(names, arguments, strict=False)), **keywords}, random)

    call.__doc__ = f"See :func:`titan_core.api.hookspecs.{hook}`."
    return call


def _is_cores(observer: object) -> bool:
    """Whether the hooks of ``observer`` run code of the core alone."""
    return type(observer).__module__.startswith("titan_core.") and not getattr(observer, "is_foreign", False)


class Lifecycle:
    """Calls every registered observer: plugin modules, and the observers of the job.

    Hooks leave random generators unchanged (:func:`same_generators`), and the tensors of the run
    (:class:`~titan_core.plugins.unchanged.Unchanged`).
    """

    def __init__(self, observers: Iterable[ModuleType | object] = ()) -> None:
        self._manager = hook_manager()
        self._taken: set[str] = set()  # names in the answers of the hook that is being called
        self._parameters: list[Tensor] = []  # of the run, once it starts
        self._checked: set[str] = set()  # hooks of observers that are not the core's
        self._unchanged: Unchanged | None = None  # while a hook is called
        for observer in observers:
            self.register(observer)

    def register(
        self,
        observer: ModuleType | object,
        origin: CodeOrigin | None = None,
        changes_weights: bool = False,
        wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None,
        has_tensors: bool = True,
    ) -> None:
        """Call the lifecycle hooks of ``observer`` from now on. An observer without hooks costs nothing.

        Args:
            origin: the plugin that owns the observer. Errors of its hooks then name the plugin
                (:class:`~titan_core.toolkit.errors.PluginFailure`).
            changes_weights: whether its hooks may change weights and gradients in place.
            wrap: (hook, its function) -> the function to call instead.
            has_tensors: whether it may have tensors in checkpoints, as one that exists on all ranks.

        Raises:
            PluginFailure: a hook is misspelt or not marked, has a wrong signature, wraps a hook that is answered, or returns
                tensors although it may have none; a ValueError for an observer that belongs to no plugin.
        """
        owner = origin or _Caller(observer)
        if observer is None or isinstance(observer, type):
            raise owner.failure(f"built {shown(observer)}; it must return an object with hooks")
        for name in dir(type(observer)):
            known = name.startswith(f"{hookspecs.PROJECT}_") and hasattr(self._manager.hook, name)
            if known and not hasattr(getattr(type(observer), name), f"{hookspecs.PROJECT}_impl"):
                raise owner.failure(
                    f"{type(observer).__name__}.{name} is not marked with @hookimpl: it would never be called"
                )
        try:
            self._manager.register(observer)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            if self._manager.is_registered(observer):
                self._manager.unregister(observer)
            name, why = type(observer).__name__, " ".join(str(error).split())  # pluggy names it by its address
            raise owner.failure(why.replace(repr(observer), name).replace(f"'{id(observer)}'", name)) from error
        for caller in self._manager.get_hookcallers(observer) or ():
            if caller.name in REGISTRATION_HOOKS:
                continue  # called at discovery
            if caller.name == "titan_state_tensors" and not has_tensors:
                raise owner.failure("implements titan_state_tensors, but exists on rank 0 only")
            for implementation in caller.get_hookimpls():
                if implementation.plugin is not observer:
                    continue
                wraps = implementation.wrapper or implementation.hookwrapper
                if wraps and caller.name in ANSWERED:
                    raise owner.failure(f"wraps {caller.name}, whose answers belong to the observers that give them")
                function = owner.guard_hook(caller.name, implementation.function, wraps)
                if caller.name in ANSWERED:
                    function = self._answering(caller.name, function, owner)
                if not wraps and caller.name in CHECKED and not _is_cores(observer):
                    if not (changes_weights and caller.name == "titan_gradients_complete"):  # it sees no other tensors
                        self._checked.add(caller.name)
                    function = self._watched(caller.name, function, owner, changes_weights)
                if wrap is not None and not wraps:
                    function = wrap(caller.name, function)
                setattr(implementation, "function", function)  # noqa: B010 - public, but declared final

    def unregister(self, observer: object) -> None:
        """Stop calling ``observer``."""
        if self._manager.is_registered(observer):
            self._manager.unregister(observer)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Check from now on that hooks change neither ``parameters`` nor their gradients."""
        from titan_core.plugins.unchanged import with_shards  # imports torch

        self._parameters = with_shards(parameters)

    restore_state = _notification(hookspecs.titan_restore_state)
    job_assembled = _notification(hookspecs.titan_job_assembled)
    train_start = _notification(hookspecs.titan_train_start)
    step_start = _notification(hookspecs.titan_step_start)
    step_cancelled = _notification(hookspecs.titan_step_cancelled)
    gradients_complete = _notification(hookspecs.titan_gradients_complete)
    step_end = _notification(hookspecs.titan_step_end)
    metrics = _notification(hookspecs.titan_metrics)
    validation_end = _notification(hookspecs.titan_validation_end)
    sample = _notification(toolkit_hooks.titan_sample)
    checkpoint_saved = _notification(hookspecs.titan_checkpoint_saved)
    finding = _notification(hookspecs.titan_finding, random=False)
    flush = _notification(hookspecs.titan_flush)
    train_end = _notification(hookspecs.titan_train_end)

    def checkpoint_failed(self, step: int, why: str) -> None:
        """See :class:`titan_core.api.CheckpointEvents`. Reported as a finding."""
        from titan_core.api import Finding  # imports torch

        self.finding(Finding("checkpoint", why, step))

    def before_update(self, update: PendingUpdate) -> bool | Tensor:
        """See :func:`titan_core.api.hookspecs.titan_before_update`. Return whether to skip the update: a tensor if the
        device has yet to decide."""
        answers = self.call("titan_before_update", {"update": update})
        if not answers:
            return False
        from titan_core.api.observe.deferred_reports import any_of  # imports torch

        return any_of(answers)

    def figures(self, record: Record) -> dict[str, float | int | None]:
        """See :func:`titan_core.api.hookspecs.titan_figures`. Return the figures of all observers.

        Raises:
            PluginFailure: a figure is already in use.
        """
        return self._merged("titan_figures", {"record": record}, record)

    def save_state(self) -> dict[str, Any]:
        """See :func:`titan_core.api.hookspecs.titan_save_state`. Return the state of all observers.

        Raises:
            PluginFailure: two observers use one name.
        """
        return self._merged("titan_save_state", {})

    def state_tensors(self) -> dict[str, Tensor]:
        """See :func:`titan_core.api.hookspecs.titan_state_tensors`. Return the tensors of all observers.

        Raises:
            PluginFailure: two observers use one name.
        """
        return self._merged("titan_state_tensors", {})

    def job_facts(self, job: AssembledJob) -> list[JobFact]:
        """See :func:`titan_core.toolkit.hookspecs.titan_job_facts`. Return the facts of all plugins."""
        return [fact for facts in self.call("titan_job_facts", {"job": job}) for fact in facts]

    def next_commands(self, job: AssembledJob, end: RunEnd, command: tuple[str, ...] | None) -> list[NextCommand]:
        """See :func:`titan_core.toolkit.hookspecs.titan_next_commands`. Return the commands of all plugins and observers."""
        answers = self.call("titan_next_commands", {"job": job, "end": end, "command": command})
        return [command for commands in answers for command in commands]

    def failed(self, end: RunEnd) -> None:
        """Call ``titan_train_end`` of every observer by itself, because ``end.error`` ended the run.

        An observer's own failure is logged; it neither hides the error nor keeps the hooks of other observers from running.
        """
        observers = [observer for _, observer in self._manager.list_name_plugin()]  # in order of registration
        for observer in observers:
            others = [other for other in observers if other is not observer]
            try:
                self._manager.subset_hook_caller("titan_train_end", others)(end=end)
            except Exception:  # must not hide the error that ended the run; logged with its traceback
                log.exception("observer %r failed at the end of the run", observer)

    def call(self, hook: str, arguments: dict[str, Any], random: bool = True) -> list[Any]:
        """Call all implementations of ``hook``, and return what those that do not return ``None`` return. A hook without
        implementations skips the guards, which cost some 15 µs.

        Args:
            random: whether random generators are guarded. During another thread's step there is no state to restore.
        """
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        if not caller.get_hookimpls():
            return []
        with self._guards(hook, arguments) if random else nullcontext():
            answers: list[Any] = caller(**arguments)
        return answers

    def _merged(self, hook: str, arguments: dict[str, Any], taken: Iterable[str] = ()) -> dict[str, Any]:
        """Return the merged mappings that all implementations of ``hook`` return, under names other than ``taken``.

        Raises:
            PluginFailure: two observers return one name.
        """
        self._taken = set(taken)
        return {name: value for answer in self.call(hook, arguments) for name, value in answer.items()}

    def _answering(self, hook: str, function: Callable[..., Any], owner: CodeOrigin | _Caller) -> Callable[..., Any]:
        """Return ``function`` with its answers checked: what is saved or recorded, and whether an update is skipped."""

        def call(*arguments: Any) -> Any:
            answer = function(*arguments)
            if must := _flaw_of_answer(hook, answer):
                raise owner.failure(f"{hook} returned {shown(answer)}; it must return {must}")
            if answer is not None and hook in MERGED:
                if clash := self._taken & answer.keys():
                    raise owner.failure(f"{hook} returned {min(clash)!r}, which is already in use: names must be unique")
                self._taken |= answer.keys()
            return answer

        return call

    @contextmanager
    def _guards(self, hook: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Let implementations of ``hook`` leave random generators, the tensors in ``arguments``, weights and gradients as
        they are."""
        before = self._unchanged
        self._unchanged = None
        if hook in self._checked:
            from titan_core.plugins.unchanged import Unchanged  # imports torch

            argument = next(iter(arguments.values()))
            self._unchanged = Unchanged(argument, self._parameters, gradients=hook != "titan_step_end")
        try:
            with same_generators():
                yield
        finally:
            self._unchanged = before

    def _watched(
        self, hook: str, function: Callable[..., Any], owner: CodeOrigin | _Caller, changes_weights: bool
    ) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            if self._unchanged is not None and (changed := self._unchanged.first_changed(changes_weights)):
                raise owner.failure(f"{hook} changed {changed}; observers must leave the tensors of a run as they are")
            return result

        return call


def _flaw_of_answer(hook: str, answer: Any) -> str:
    """Return what the implementation of a hook must return instead of ``answer``; empty if that is right."""
    if answer is None:
        return ""
    torch: Any = sys.modules.get("torch")  # if torch is not imported, no tensor exists
    of_torch = () if torch is None else (torch.Tensor,)
    if hook == "titan_before_update":
        flag = isinstance(answer, of_torch) and answer.dtype is torch.bool and not answer.dim()
        return "" if flag or isinstance(answer, bool) else "a bool, a 0-d bool tensor or None"
    if hook not in MERGED:
        kind: type = JobFact
        if hook == "titan_next_commands":
            from titan_core.api.observe.events import NextCommand as kind  # imports torch
        right = isinstance(answer, list | tuple) and all(isinstance(one, kind) for one in answer)
        return "" if right else f"a list of {kind.__name__}"
    values = list(answer.values()) if isinstance(answer, Mapping) and all(isinstance(name, str) for name in answer) else None
    if hook == "titan_save_state":
        right = isinstance(answer, dict) and survives_json(answer)
        return "" if right else "a dict of plain values with string keys, because it is saved as JSON"
    if hook == "titan_state_tensors":
        right = values is not None and all(isinstance(value, of_torch) for value in values)
        return "" if right else "a mapping from names to tensors"
    right = values is not None and all(
        value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in values
    )
    return "" if right else "a mapping from names to numbers, and None for one that is unknown or not finite"
