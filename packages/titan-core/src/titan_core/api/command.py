"""What a subcommand of ``titan`` is run with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Protocol

from titan_core.api.config import Config, Override
from titan_core.api.job import Job
from titan_core.api.registry import Registry


class CommandContext(Protocol):
    """One call of a command: its arguments, and the job that they name."""

    @property
    def arguments(self) -> argparse.Namespace:
        """What the command's own parser read."""
        ...

    @property
    def overrides(self) -> Sequence[Override]:
        """The ``--section.key value`` arguments."""
        ...

    @property
    def override_arguments(self) -> Sequence[str]:
        """The same, as they were written."""
        ...

    @property
    def registry(self) -> Registry:
        """All that is installed, plugins that the recipe switches off included."""
        ...

    def config(self, more: Sequence[Override] = ()) -> Config:
        """The config of ``arguments.recipe`` with :attr:`overrides` and ``more``, of which the last one of a key counts.

        Raises:
            UserError: all mistakes in it.
        """
        ...

    def job(self, world_size: int | None = None, more: Sequence[Override] = ()) -> Job:
        """The job that :meth:`config` assembles to, on ``world_size`` ranks (default: the fewest that it allows).

        Raises:
            UserError: all mistakes in it.
        """
        ...
