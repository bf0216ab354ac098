"""The lifecycle hooks as typed methods, which the trainer calls."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from titan_core.api import hookspecs
from titan_core.api.job import Job, JobFact
from titan_core.api.metric_log import Record
from titan_core.api.ref import CodeOrigin
from titan_core.api.tools.plain_json import survives_json
from titan_core.api.tools.random_state import same_generators

if TYPE_CHECKING:
    from torch import Tensor

    from titan_core.api.events import (
        EndedRun,
        Finding,
        NextCommand,
        PendingUpdate,
        RunStart,
        Sample,
        StepReport,
        TrainEnd,
        ValidationReport,
    )


log = logging.getLogger(__name__)
L = TypeVar("L")


class Lifecycle:
    """Calls every registered observer: plugin modules, debuggers and metric loggers.

    Hooks leave random generators unchanged: see :func:`same_generators`.
    """

    def __init__(self, observers: Iterable[ModuleType | object] = ()) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._tensors_collected = False  # by a checkpoint, which loads into the tensors collected first
        self._restored: Mapping[str, Any] | None = None  # for observers that register later, such as metric loggers
        for observer in observers:
            self.register(observer)

    def register(
        self,
        observer: ModuleType | object,
        failed: Callable[[Exception], None] | None = None,
        origin: CodeOrigin | None = None,
    ) -> None:
        """Call the lifecycle hooks of ``observer`` from now on. An observer without hooks costs nothing.

        Args:
            failed: receives exceptions of the observer's hooks, which then do not end the run.
            origin: the plugin that owns the observer. Errors of its hooks then name the plugin
                (:class:`~titan_core.api.errors.PluginFailure`).

        Raises:
            pluggy.PluginValidationError: a hook is misspelt or has a wrong signature.
            ValueError: the observer has state tensors, and registers after they were collected.
        """
        self._manager.register(observer)
        self._manager.check_pending()
        for caller in self._manager.get_hookcallers(observer) or ():
            if caller.name == "titan_state_tensors" and self._tensors_collected:
                raise ValueError(
                    f"{observer!r} implements titan_state_tensors, but metric loggers are built after the restore"
                )
            for implementation in caller.get_hookimpls():
                if implementation.plugin is observer:
                    function = _guarded(caller.name, implementation, failed, origin)
                    setattr(implementation, "function", function)  # noqa: B010 - public, but declared final

        if self._restored is not None:
            others = [other for _, other in self._manager.list_name_plugin() if other is not observer]
            self._manager.subset_hook_caller("titan_restore_state", others)(state=self._restored)

    def unregister(self, observer: object) -> None:
        """Stop calling ``observer``."""
        if self._manager.is_registered(observer):
            self._manager.unregister(observer)

    def job_assembled(self, job: Job) -> None:
        """See :func:`titan_core.api.hookspecs.titan_job_assembled`."""
        self._manager.hook.titan_job_assembled(job=job)

    def job_facts(self, job: Job) -> list[JobFact]:
        """See :func:`titan_core.api.hookspecs.titan_job_facts`. Return the facts of all plugins.

        Raises:
            ValueError: an answer contains something else.
        """
        return self._listed(self._manager.hook.titan_job_facts, job, JobFact)

    def train_start(self, run: RunStart) -> None:
        """See :func:`titan_core.api.hookspecs.titan_train_start`."""
        self._call(self._manager.hook.titan_train_start, run=run)

    def step_start(self, step: int) -> None:
        """See :func:`titan_core.api.hookspecs.titan_step_start`."""
        self._call(self._manager.hook.titan_step_start, step=step)

    def step_cancelled(self, step: int) -> None:
        """See :func:`titan_core.api.hookspecs.titan_step_cancelled`."""
        self._call(self._manager.hook.titan_step_cancelled, step=step)

    def gradients_complete(self, step: int) -> None:
        """See :func:`titan_core.api.hookspecs.titan_gradients_complete`."""
        self._call(self._manager.hook.titan_gradients_complete, step=step)

    def before_update(self, update: PendingUpdate) -> bool | Tensor:
        """See :func:`titan_core.api.hookspecs.titan_before_update`. Return whether to skip the update: a tensor if the
        device has yet to decide.

        Raises:
            TypeError: an observer returned neither a bool, nor a 0-d bool tensor, nor ``None``.
        """
        answers = self._call(self._manager.hook.titan_before_update, update=update)  # pluggy drops None
        if not answers:
            return False
        from titan_core.api.tools.deferred_reports import any_of  # imports torch

        return any_of(answers)

    def step_end(self, report: StepReport) -> None:
        """See :func:`titan_core.api.hookspecs.titan_step_end`."""
        self._call(self._manager.hook.titan_step_end, report=report)

    def figures(self, record: Record) -> dict[str, float | int | None]:
        """See :func:`titan_core.api.hookspecs.titan_figures`. Return the figures of all observers.

        Raises:
            ValueError: an observer did not return a mapping to numbers, or a figure is already in use.
        """
        merged: dict[str, float | int | None] = {}
        for implementation in self._manager.hook.titan_figures.get_hookimpls():
            with same_generators():
                figures = implementation.function(*[record] * len(implementation.argnames)) or {}
            if not isinstance(figures, Mapping) or not all(
                isinstance(figure, float | int | None) for figure in figures.values()
            ):
                raise ValueError(f"titan_figures of {implementation.plugin!r} must return a mapping from names to numbers")
            if clash := (record.keys() | merged.keys()) & figures.keys():
                raise ValueError(
                    f"titan_figures of {implementation.plugin!r} returned {min(clash)!r}, which is already in use"
                )
            merged |= figures
        return merged

    def validation_end(self, report: ValidationReport) -> None:
        """See :func:`titan_core.api.hookspecs.titan_validation_end`."""
        self._call(self._manager.hook.titan_validation_end, report=report)

    def sample(self, sample: Sample) -> None:
        """See :func:`titan_core.api.hookspecs.titan_sample`."""
        self._call(self._manager.hook.titan_sample, sample=sample)

    def save_state(self) -> dict[str, Any]:
        """See :func:`titan_core.api.hookspecs.titan_save_state`. Return the state of all observers.

        Raises:
            ValueError: two observers use one name, or JSON cannot represent a state.
        """
        return _merged(
            self._manager.hook.titan_save_state,
            lambda state: isinstance(state, dict) and survives_json(state),
            "must return a dict of plain values with string keys, because it is saved as JSON",
        )

    def state_tensors(self) -> dict[str, Tensor]:
        """See :func:`titan_core.api.hookspecs.titan_state_tensors`. Return the tensors of all observers.

        Raises:
            ValueError: two observers use one name, or one did not return a mapping to tensors.
        """
        self._tensors_collected = True
        return _merged(
            self._manager.hook.titan_state_tensors, _maps_to_tensors, "must return a mapping from names to tensors"
        )

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """See :func:`titan_core.api.hookspecs.titan_restore_state`."""
        self._restored = state
        self._call(self._manager.hook.titan_restore_state, state=state)

    def checkpoint_saved(self, step: int, path: str) -> None:
        """See :func:`titan_core.api.hookspecs.titan_checkpoint_saved`."""
        self._call(self._manager.hook.titan_checkpoint_saved, step=step, path=path)

    def checkpoint_failed(self, step: int, why: str) -> None:
        """See :class:`titan_core.api.checkpoint.CheckpointEvents`. Reported as a finding."""
        from titan_core.api.events import Finding  # imports torch

        self.finding(Finding("checkpoint", why, step))

    def finding(self, finding: Finding) -> None:
        """See :func:`titan_core.api.hookspecs.titan_finding`. Any thread may call it, so the caller must guard random
        generators: during another thread's step there is no state to restore."""
        self._manager.hook.titan_finding(finding=finding)

    def flush(self, step: int) -> None:
        """See :func:`titan_core.api.hookspecs.titan_flush`."""
        self._call(self._manager.hook.titan_flush, step=step)

    def failed(self, error: BaseException, end: TrainEnd) -> None:
        """Call ``titan_exception`` and ``titan_train_end`` of every observer, because ``error`` ended the run.

        An observer's own failure is logged; it neither hides ``error`` nor keeps the hooks of other observers from running.
        """
        observers = [observer for _, observer in self._manager.list_name_plugin()]  # in order of registration
        for observer in observers:
            others = [other for other in observers if other is not observer]
            for name, arguments in (("titan_exception", {"error": error}), ("titan_train_end", {"end": end})):
                try:
                    self._manager.subset_hook_caller(name, others)(**arguments)
                except Exception:  # must not hide the error that ended the run; logged with its traceback
                    log.exception("observer %r failed in %s", observer, name)

    def train_end(self, end: TrainEnd) -> None:
        """See :func:`titan_core.api.hookspecs.titan_train_end`."""
        self._manager.hook.titan_train_end(end=end)

    def next_commands(self, run: EndedRun) -> list[NextCommand]:
        """See :func:`titan_core.api.hookspecs.titan_next_commands`. Return the commands of all plugins and observers.

        Raises:
            ValueError: an answer contains something else.
        """
        from titan_core.api.events import NextCommand  # imports torch

        return self._listed(self._manager.hook.titan_next_commands, run, NextCommand)

    @staticmethod
    def _listed(hook: pluggy.HookCaller, argument: object, kind: type[L]) -> list[L]:
        """Return the items of all answers to ``hook``.

        Raises:
            ValueError: an answer contains something else than ``kind``.
        """
        found: list[L] = []
        for implementation in reversed(hook.get_hookimpls()):
            answer: Any = implementation.function(*[argument] * len(implementation.argnames)) or []
            if not isinstance(answer, Sequence) or not all(isinstance(one, kind) for one in answer):
                raise ValueError(f"{hook.name} of {implementation.plugin!r} must return a list of {kind.__name__}")
            found += answer
        return found

    @staticmethod
    def _call(hook: pluggy.HookCaller, **arguments: Any) -> list[Any]:
        """Return the answers of all implementations of ``hook``. A hook without any skips the guard of the random
        generators, which costs 15 µs."""
        if not hook.get_hookimpls():
            return []
        with same_generators():
            answers: list[Any] = hook(**arguments)
        return answers


def _merged(hook: pluggy.HookCaller, is_valid: Callable[[Any], bool], rule: str) -> dict[str, Any]:
    """Return the merged results of all observers that implement ``hook``.

    Args:
        is_valid: whether a result is what the hook must return, as ``rule`` says.

    Raises:
        ValueError: a result is not valid, or two observers use one name.
    """
    merged: dict[str, Any] = {}
    for implementation in hook.get_hookimpls():
        with same_generators():
            found: Any = implementation.function() or {}
        if not is_valid(found):
            raise ValueError(f"{hook.name} of {implementation.plugin!r} {rule}")
        if clash := merged.keys() & found.keys():
            raise ValueError(f"two observers return the name {min(clash)!r} from {hook.name}: names must be unique")
        merged |= found
    return merged


def _maps_to_tensors(tensors: object) -> bool:
    if not isinstance(tensors, Mapping):
        return False
    torch: Any = sys.modules.get("torch")  # if torch is not imported, no tensor exists
    return all(isinstance(name, str) and torch and isinstance(value, torch.Tensor) for name, value in tensors.items())


def _guarded(
    hook: str,
    implementation: pluggy.HookImpl,
    failed: Callable[[Exception], None] | None,
    origin: CodeOrigin | None,
) -> Callable[..., Any]:
    function = implementation.function
    if origin is not None:
        guard = origin.guard_wrapper if implementation.wrapper or implementation.hookwrapper else origin.guard
        function = guard(hook, function)
    if failed is None:
        return function

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001 - ``failed`` reports it, whatever it is
            failed(error)
            return None

    return call
