"""The lifecycle hooks, each as a typed method: what the trainer calls."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import pluggy

from titan_core.api import hookspecs
from titan_core.api.ref import CodeOrigin
from titan_core.api.tools.plain_json import survives_json
from titan_core.api.tools.random_state import same_generators

if TYPE_CHECKING:
    from torch import Tensor

    from titan_core.api.events import Finding, PendingUpdate, RunStart, StepReport, TrainEnd, ValidationReport
    from titan_core.api.job import Job
    from titan_core.api.metric_log import Record


log = logging.getLogger(__name__)


class Lifecycle:
    """Calls every registered observer. Observers are plugin modules, debuggers, metric loggers.

    No hook changes what training draws at random: see :func:`same_generators`.
    """

    def __init__(self, observers: Iterable[ModuleType | object] = ()) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._gave_tensors = False  # to a checkpoint, which loads into those of this time
        self._restored: Mapping[str, Any] | None = None  # for observers that come later: metric loggers
        for observer in observers:
            self.register(observer)

    def register(
        self,
        observer: ModuleType | object,
        failed: Callable[[Exception], None] | None = None,
        origin: CodeOrigin | None = None,
    ) -> None:
        """Let ``observer`` hear of the run. One without lifecycle hooks hears nothing, at no cost.

        Args:
            failed: takes what a hook of the observer's raises, which then does not end the run.
            origin: whose the observer is. What a hook of it raises then names the plugin
                (:class:`~titan_core.api.errors.PluginFailure`).

        Raises:
            pluggy.PluginValidationError: a hook that is misspelt or wrongly signed.
            ValueError: it comes too late for the hooks that it has.
        """
        self._manager.register(observer)
        self._manager.check_pending()
        for caller in self._manager.get_hookcallers(observer) or ():
            if caller.name == "titan_state_tensors" and self._gave_tensors:
                raise ValueError(
                    f"{observer!r} keeps tensors, and is built after a checkpoint is restored: a metric logger cannot"
                )
            for implementation in caller.get_hookimpls():
                if implementation.plugin is observer:
                    function = _guarded(caller.name, implementation, failed, origin)
                    setattr(implementation, "function", function)  # noqa: B010 - it is public, but declared final

        if self._restored is not None:
            others = [one for _, one in self._manager.list_name_plugin() if one is not observer]
            self._manager.subset_hook_caller("titan_restore_state", others)(state=self._restored)

    def unregister(self, observer: object) -> None:
        """Let ``observer`` hear no more."""
        if self._manager.is_registered(observer):
            self._manager.unregister(observer)

    def job_assembled(self, job: Job) -> None:
        """See :func:`titan_core.api.hookspecs.titan_job_assembled`."""
        self._manager.hook.titan_job_assembled(job=job)

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

    def before_update(self, update: PendingUpdate) -> bool:
        """See :func:`titan_core.api.hookspecs.titan_before_update`; whether the update is to be left out.

        Raises:
            TypeError: an observer returns neither a bool nor ``None``.
        """
        answers = self._call(self._manager.hook.titan_before_update, update=update)  # without those that are None
        strange = next((answer for answer in answers if not isinstance(answer, bool)), None)
        if strange is not None:
            raise TypeError(f"a titan_before_update returned {strange!r}, which is neither a bool nor None")
        return True in answers

    def step_end(self, report: StepReport) -> None:
        """See :func:`titan_core.api.hookspecs.titan_step_end`."""
        self._call(self._manager.hook.titan_step_end, report=report)

    def figures(self, record: Record) -> dict[str, float | int | None]:
        """See :func:`titan_core.api.hookspecs.titan_figures`; of all observers together.

        Raises:
            ValueError: an observer returns no table of numbers, or a figure that there is.
        """
        together: dict[str, float | int | None] = {}
        for implementation in self._manager.hook.titan_figures.get_hookimpls():
            with same_generators():
                figures = implementation.function(*[record] * len(implementation.argnames)) or {}
            if not isinstance(figures, Mapping) or not all(isinstance(one, float | int | None) for one in figures.values()):
                raise ValueError(f"titan_figures of {implementation.plugin!r} must return a table of numbers by name")
            if clash := (record.keys() | together.keys()) & figures.keys():
                raise ValueError(
                    f"titan_figures of {implementation.plugin!r} returned {min(clash)!r}, which there is already"
                )
            together |= figures
        return together

    def validation_end(self, report: ValidationReport) -> None:
        """See :func:`titan_core.api.hookspecs.titan_validation_end`."""
        self._call(self._manager.hook.titan_validation_end, report=report)

    def save_state(self) -> dict[str, Any]:
        """See :func:`titan_core.api.hookspecs.titan_save_state`; of all observers together.

        Raises:
            ValueError: two of them use one name, or one gives what JSON cannot say.
        """
        together: dict[str, Any] = {}
        for implementation in self._manager.hook.titan_save_state.get_hookimpls():
            with same_generators():
                state = implementation.function() or {}
            if not isinstance(state, dict) or not survives_json(state):
                what = "a table of plain values, with texts as keys: it is kept as JSON"
                raise ValueError(f"titan_save_state of {implementation.plugin!r} must return {what}")
            if clash := together.keys() & state.keys():
                raise ValueError(f"two observers keep a state under the name {min(clash)!r}: each needs a name of its own")
            together |= state
        return together

    def state_tensors(self) -> dict[str, Tensor]:
        """See :func:`titan_core.api.hookspecs.titan_state_tensors`; of all observers together.

        Raises:
            ValueError: two of them use one name, or one returns no table of tensors.
        """
        self._gave_tensors = True
        together: dict[str, Tensor] = {}
        for implementation in self._manager.hook.titan_state_tensors.get_hookimpls():
            with same_generators():
                tensors = implementation.function() or {}
            if not _is_table_of_tensors(tensors):
                raise ValueError(f"titan_state_tensors of {implementation.plugin!r} must return a table of tensors by name")
            if clash := together.keys() & tensors.keys():
                raise ValueError(f"two observers keep a tensor under the name {min(clash)!r}: each needs a name of its own")
            together |= tensors
        return together

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """See :func:`titan_core.api.hookspecs.titan_restore_state`."""
        self._restored = state
        self._call(self._manager.hook.titan_restore_state, state=state)

    def checkpoint_saved(self, step: int, path: str) -> None:
        """See :func:`titan_core.api.hookspecs.titan_checkpoint_saved`."""
        self._call(self._manager.hook.titan_checkpoint_saved, step=step, path=path)

    def finding(self, finding: Finding) -> None:
        """See :func:`titan_core.api.hookspecs.titan_finding`. Any thread may call it, so it leaves random generators to its
        caller: in the midst of another thread's step there is no state of them to return to."""
        self._manager.hook.titan_finding(finding=finding)

    def flush(self, step: int) -> None:
        """See :func:`titan_core.api.hookspecs.titan_flush`."""
        self._call(self._manager.hook.titan_flush, step=step)

    def failed(self, error: BaseException, end: TrainEnd) -> None:
        """The run ends by ``error``: call both hooks of every observer. One that fails itself is logged, and neither hides
        ``error`` nor keeps the others from hearing of it."""
        observers = [observer for _, observer in self._manager.list_name_plugin()]  # in the order of their registration
        for observer in observers:
            others = [other for other in observers if other is not observer]
            for name, arguments in (("titan_exception", {"error": error}), ("titan_train_end", {"end": end})):
                try:
                    self._manager.subset_hook_caller(name, others)(**arguments)
                except Exception:  # an observer's own failure must not hide the one that ends the run; it is logged whole
                    log.exception("observer %r failed in %s", observer, name)

    def train_end(self, end: TrainEnd) -> None:
        """See :func:`titan_core.api.hookspecs.titan_train_end`."""
        self._manager.hook.titan_train_end(end=end)

    @staticmethod
    def _call(hook: pluggy.HookCaller, **arguments: Any) -> list[Any]:
        """What the observers of ``hook`` answer. Without any it costs next to nothing, as a guard of the generators would
        (15 µs) in each step."""
        if not hook.get_hookimpls():
            return []
        with same_generators():
            answers: list[Any] = hook(**arguments)
        return answers


def _is_table_of_tensors(tensors: object) -> TypeGuard[Mapping[str, Tensor]]:
    if not isinstance(tensors, Mapping):
        return False
    torch: Any = sys.modules.get("torch")  # without it there is no tensor
    return all(isinstance(key, str) and torch and isinstance(one, torch.Tensor) for key, one in tensors.items())


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
        except Exception as error:  # noqa: BLE001 - whatever it is, ``failed`` reports it
            failed(error)
            return None

    return call
