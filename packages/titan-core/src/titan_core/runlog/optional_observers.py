"""Observers that may fail, such as metric loggers: one that does is switched off with a warning, unless the cause is
transient, such as a full disk. Training continues."""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from titan_core.api import Finding, Observer, Record, Run, hookimpl
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.toolkit.errors import PluginFailure

log = logging.getLogger(__name__)

TRANSIENT = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
"""Errors that a disk or a network file system may recover from."""


def register_late_observers(job: AssembledJob, lifecycle: Lifecycle, rank: int) -> None:
    """Build and register the observers of ``job`` that exist on rank 0 only, or may fail."""
    here = [one for one in job.observers if rank == 0 or not one.first_rank]
    for one in here:
        if one.first_rank and not one.may_fail:
            made, origin = one.build.load()(one.context(job)), job.registry.origin(one)
            lifecycle.register(made, origin=origin, has_tensors=False)
    OptionalObservers(lifecycle).build((one for one in here if one.may_fail), job)


class OptionalObservers:
    """Builds observers that may fail, and watches their hooks."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._running: dict[str, object] = {}
        self._missed: Counter[tuple[str, str]] = Counter()  # failed calls of hooks that have not recovered
        self._early: list[str] = []  # failures before there is a run to report them to
        self._run: Run | None = None
        self._step = 0
        lifecycle.register(self)

    def build(self, components: Iterable[Observer], job: AssembledJob) -> None:
        """Build each observer, and register its hooks."""
        for component in components:
            name = component.name
            try:
                made = component.build.load()(component.context(job))
                watch = partial(self._watched, name)
                self._lifecycle.register(
                    made, wrap=watch, origin=component.build.origin, has_tensors=not component.first_rank
                )
            except Exception as error:  # noqa: BLE001 - reported; the observer must not end the run
                self._switch_off(name, error)
            else:
                self._running[name] = made

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Report the failures before the run."""
        self._run, self._step = run, run.step
        for message in self._early:
            run.report(Finding("observer", message, run.step))

    @hookimpl(tryfirst=True)
    def titan_metrics(self, record: Record) -> None:
        """Note the step."""
        self._step = int(record["step"] or 0)

    def _watched(self, name: str, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                result = function(*arguments)
            except Exception as error:  # noqa: BLE001 - as above
                return self._failed(name, hook, error)
            if missed := self._missed.pop((name, hook), 0):
                log.warning("observer %r works again after %d failed calls", name, missed)
            return result

        return call

    def _failed(self, name: str, hook: str, error: Exception) -> None:
        cause = error.__cause__ if isinstance(error, PluginFailure) else error
        if not isinstance(cause, OSError) or cause.errno not in TRANSIENT:
            self._switch_off(name, error)
            return
        if not self._missed[name, hook]:
            log.warning("observer %r failed and will be called again: %s", name, cause.strerror)
        self._missed[name, hook] += 1

    def _switch_off(self, name: str, error: Exception) -> None:
        observer = self._running.pop(name, None)
        if observer is not None:
            self._lifecycle.unregister(observer)
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, PluginFailure):
            why = f"{error.problems[0].where}: {error.problems[0].why}"
        message = f"observer {name!r} failed and is switched off: {why}"
        log.warning("%s; training continues without it", message)
        log.debug("traceback of the failure", exc_info=error)
        if self._run is None:
            self._early.append(message)
        else:
            self._run.report(Finding("observer", message, self._step))
