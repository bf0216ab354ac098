"""The ``titan`` command: finds a command among those of the plugins and runs it. Does not import torch."""

from __future__ import annotations

import argparse
import errno
import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from titan_core.api.command import Command
from titan_core.api.errors import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError, nearest
from titan_core.api.launcher import reported_by_launcher
from titan_core.api.tools.arguments import parse_overrides
from titan_core.api.tools.secrets import redact_text
from titan_core.api.tools.shown import shorten
from titan_core.cli.invocation import Invocation, default_recipe
from titan_core.cli.launch_options import LaunchOptions
from titan_core.config.render import describe_options
from titan_core.plugins.discovery import CORE
from titan_core.plugins.providers import provider, provider_of_group
from titan_core.plugins.registry import Registry

_NO_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are reported like all other errors."""

    def error(self, message: str) -> NoReturn:
        raise UserError.one("command line", message, f"see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``titan`` with ``argv`` (default: the arguments of the process) and return the exit status."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        if os.environ.get("TITAN_TRACEBACK"):
            raise
        if not reported_by_launcher():
            report(error)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("titan: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        # The reader has closed the pipe (`titan plugins | head`). Keep Python from reporting that when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        mistake = _path_error(error)
        if mistake is None or os.environ.get("TITAN_TRACEBACK"):
            raise
        report(mistake)
        return EXIT_USER_ERROR


def _path_error(error: OSError) -> UserError | None:
    """Return a user error if the path cannot exist on any file system; ``None`` for other failures."""
    if error.errno not in _NO_PATH or error.filename is None:
        return None
    return UserError.one(shorten(os.fsdecode(error.filename)), f"cannot be used: {error.strerror}", "give another path")


def _stdout_is_closed() -> bool:
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def report(error: UserError) -> None:
    """Print one line per problem. Ranks other than 0 prefix their number."""
    rank = os.environ.get("RANK")
    prefix = "titan: error: " if rank in (None, "0") else f"titan: error: [rank {rank}] "
    for problem in error.problems:
        line = f"{prefix}{redact_text(str(problem))}"
        print(
            line.encode(errors="backslashreplace").decode(), file=sys.stderr
        )  # arguments may contain bytes that are not text


def _run(argv: list[str]) -> int:
    registry = Registry.from_installed()
    commands: dict[str, Command] = {}
    for command in registry.all(Command):
        commands.setdefault(command.name, command)  # the core's come first; duplicates are conflicts, reported below
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview(commands))
        return 0
    if argv[0] == "--version":
        core = next(plugin for plugin in registry.found.plugins if plugin.name == CORE)
        print(f"titan-core {core.version}")
        return 0
    command, arguments = _find(commands, argv, registry)
    claims = [problem for problem in registry.conflicts if problem.where == f"command {command.name!r}"]
    if claims and command.name != "plugins":
        raise UserError(*claims)
    own, overrides = _split(arguments) if command.overrides else (arguments, [])
    parser = _Parser(
        prog=f"titan {command.name}",
        description=command.summary,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if command.overrides and not {"-h", "--help"}.isdisjoint(
        own
    ):  # only on request, because it reads the source of every section
        parser.epilog = describe_options(registry.sections())
    if command.arguments is not None:
        command.arguments.load()(parser)
    launch = LaunchOptions(parser, registry) if command.launches else None
    namespace = parser.parse_args(own)
    if launch is not None:
        namespace.launcher = launch.requested(namespace)
    if "recipe" in namespace and namespace.recipe is None:
        namespace.recipe = default_recipe(registry)
    in_ranks = [*command.name.split(), *(own if launch is None else launch.removed_from(own)), *overrides]
    invocation = Invocation(namespace, registry, parse_overrides(overrides), overrides, in_ranks)
    run = command.run.load()
    gc.enable()
    return run(invocation)


def _find(commands: dict[str, Command], argv: list[str], registry: Registry) -> tuple[Command, list[str]]:
    """Return the command that ``argv`` begins with (one or two words), and the remaining arguments."""
    for words in (2, 1):
        name = " ".join(argv[:words])
        if name in commands and len(argv) >= words:
            return commands[name], argv[words:]
        _require_installed(name, provider("command", name), registry)
    group = [name.split()[1] for name in commands if name.startswith(argv[0] + " ")]
    if group:
        subcommand = argv[1] if len(argv) > 1 and not argv[1].startswith("-") else ""
        if not subcommand:
            raise UserError.one(f"titan {argv[0]}", "needs a subcommand", f"use one of {', '.join(group)}")
        raise UserError.one(f"titan {argv[0]} {subcommand}", "no such command", nearest(subcommand, group))
    _require_installed(argv[0], provider_of_group(argv[0]), registry)
    first_words = list(dict.fromkeys(name.split()[0] for name in commands))
    raise UserError.one(f"titan {argv[0]}", "no such command", nearest(argv[0], first_words))


def _require_installed(command: str, package: str | None, registry: Registry) -> None:
    """Raise if ``command`` belongs to a ``package`` that is not in use."""
    if package is not None and package not in {plugin.distribution for plugin in registry.found.plugins}:
        raise UserError.one(f"titan {command}", f"is provided by {package}", registry.remedy(package))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate ``--section.key VALUE`` from a command's own arguments: argparse would take the values as positionals."""
    own: list[str] = []
    overrides: list[str] = []
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        flag, equals, _ = argument.partition("=")
        if flag.startswith("--") and "." in flag:
            overrides.append(argument)
            if not equals and waiting and not waiting[-1].startswith("--"):
                overrides.append(waiting.pop())
        else:
            own.append(argument)
    return own, overrides


def _overview(commands: dict[str, Command]) -> str:
    width = max(map(len, commands)) + 2
    lines = ["usage: titan COMMAND ...", "", "Pre-train language models with jobs assembled from plugins.", ""]
    lines += [f"  titan {name:<{width}} {command.summary}" for name, command in commands.items()]
    return "\n".join([*lines, "", "See `titan COMMAND --help`. TITAN_TRACEBACK=1 shows the tracebacks of errors."])
