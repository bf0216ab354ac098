"""The metric loggers of a run. A logger that fails is switched off with a warning, unless the cause is transient, such as a
full disk; training continues."""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from titan_core.api import Finding, LoggerContext, MetricLog, MetricLogger, Record, Run
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.toolkit.errors import PluginFailure

log = logging.getLogger(__name__)

TRANSIENT = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
"""Errors that a disk or a network file system may recover from."""


class Loggers:
    """The loggers that were built and are not switched off."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._running: dict[str, MetricLog] = {}
        self._missed: Counter[str] = Counter()  # failed calls of loggers that have not recovered
        self._run: Run | None = None
        self._step = 0

    def build(self, components: Iterable[MetricLogger], run: Run, device_name: str) -> None:
        """Build a logger from each component, and register it as an observer of the run."""
        self._run, self._step = run, run.step
        job = run.job
        for component in components:
            name = component.name
            try:
                section = component.section_in(job.config)
                context = LoggerContext(section=section, job=job, run=run, device_name=device_name)
                logger = component.build.load()(context)
                self._lifecycle.register(logger, failed=partial(self._failed, name), origin=component.build.origin)
            except Exception as error:  # noqa: BLE001 - reported; a logger must not end the run
                self._switch_off(name, error)
                continue
            self._running[name] = logger

    def log(self, record: Record) -> None:
        """Pass ``record`` to each logger."""
        self._step = int(record["step"] or 0)
        for name in self._each(lambda logger: logger.log(record)):
            if missed := self._missed.pop(name, 0):
                log.warning("metric logger %r works again after %d failed calls", name, missed)

    def close(self) -> None:
        """Close each logger."""
        self._each(lambda logger: logger.close())

    def _each(self, call: Callable[[MetricLog], None]) -> list[str]:
        """Apply ``call`` to each logger; return the names of those that did not fail."""
        worked = []
        for name, logger in list(self._running.items()):
            try:
                call(logger)
            except Exception as error:  # noqa: BLE001 - as above
                self._failed(name, error)
            else:
                worked.append(name)
        return worked

    def _failed(self, name: str, error: Exception) -> None:
        cause = error.__cause__ if isinstance(error, PluginFailure) else error
        if not isinstance(cause, OSError) or cause.errno not in TRANSIENT:
            self._switch_off(name, error)
            return
        if not self._missed[name]:
            log.warning("metric logger %r failed and will be retried at the next step: %s", name, cause.strerror)
        self._missed[name] += 1

    def _switch_off(self, name: str, error: Exception) -> None:
        logger = self._running.pop(name, None)
        if logger is not None:
            self._lifecycle.unregister(logger)
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, PluginFailure):
            why = f"{error.problems[0].where}: {error.problems[0].why}"
        message = f"metric logger {name!r} failed and is switched off: {why}"
        log.warning("%s; training continues without it", message)
        log.debug("traceback of the failure", exc_info=error)
        if self._run is not None:
            self._run.report(Finding("logger", message, self._step))
