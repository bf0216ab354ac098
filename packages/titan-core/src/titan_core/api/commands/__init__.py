"""How do I add a subcommand, or a check of the machine?

A command adds its arguments to a parser, and returns its exit status::

    def run(context: CommandContext) -> int:
        job = context.job(world_size=context.arguments.world_size)
        print(job.name)
        return 0

* ``Command``: a subcommand
* ``CommandContext``: its arguments, configs and jobs
* ``Registry``: all components by kind and name
* ``HealthCheck``: a check for ``titan doctor``
* ``HealthContext``: its context
* ``CheckResult``: one of its results
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.commands.command import Command as Command, CommandContext as CommandContext
    from titan_core.api.commands.health import (
        CheckResult as CheckResult,
        HealthCheck as HealthCheck,
        HealthContext as HealthContext,
    )
    from titan_core.api.commands.registry import Registry as Registry
else:
    __getattr__ = getter(__name__, "commands")
    __all__ = names_of("commands")
