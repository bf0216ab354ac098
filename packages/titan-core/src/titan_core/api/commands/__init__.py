"""How do I add a subcommand, or a check of the machine?

A ``Command`` (hook ``titan_commands``) refers to a function that returns the exit status::

    def run(context: CommandContext) -> int:
        job = context.job(world_size=context.arguments.world_size)
        print(job.name)
        return 0

* ``Command``: a subcommand, its arguments and its place in ``titan --help``
* ``CommandContext``: what ``Command.run`` receives; loads configs, assembles jobs, trains
* ``Registry``: looks up the installed components by kind and name
* ``HealthCheck``: a check that ``titan doctor`` runs (hook ``titan_health_checks``)
* ``HealthContext``: what ``HealthCheck.check`` receives
* ``CheckResult``: one line of the report: subject, health, detail, fix
* ``Health``: how much a result matters: ok, note, warning or error
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.commands.command import Command as Command, CommandContext as CommandContext
    from titan_core.api.commands.health import (
        CheckResult as CheckResult,
        Health as Health,
        HealthCheck as HealthCheck,
        HealthContext as HealthContext,
    )
    from titan_core.api.commands.registry import Registry as Registry
else:
    __getattr__ = getter(__name__, "commands")
    __all__ = names_of("commands")
