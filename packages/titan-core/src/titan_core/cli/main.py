"""The ``titan`` command: finds a command among those of the plugins and runs it. Does not import torch."""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from shlex import quote

from titan_core.api import Command, Problem, UserError
from titan_core.api._shown import shorten
from titan_core.api.config.secrets import redact_text
from titan_core.api.plugins.errors import shown
from titan_core.cli.help import CommandParser, listing, overview, parser_of
from titan_core.cli.invocation import Invocation, default_recipe
from titan_core.cli.launch_options import LaunchOptions
from titan_core.cli.overrides import SplitArguments, split_overrides, unknown_argument
from titan_core.cli.plugins import print_conflicts, versions
from titan_core.config.overrides import without_dashes
from titan_core.plugins.guard import named
from titan_core.plugins.names import check_start
from titan_core.plugins.providers import provider, provider_of_group
from titan_core.plugins.registry import Components
from titan_core.toolkit.arguments import parse_overrides
from titan_core.toolkit.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    MOST_PROBLEMS,
    exit_status,
    locale_error,
    nearest,
)
from titan_core.toolkit.launching import reported_by_launcher
from titan_core.toolkit.output import OutputClosed, continue_without, standard_streams
from titan_core.toolkit.plugin_files import OPTION as PLUGIN_OPTION, using_plugin_files
from titan_core.toolkit.text import say

_HELP = ("-h", "--help")
_HELP_ALL = "--help-all"
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_FILE_FIXES = {
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EROFS), "give another path"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions, or give another path"),
    **dict.fromkeys(_FULL_DISK, "free some space, or write to another disk"),
}
"""Failures of files that a user can fix."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``titan`` with ``argv`` (default: the arguments of the process) and return the exit status."""
    with standard_streams():
        try:
            try:
                status = _reported(list(sys.argv[1:] if argv is None else argv))
            except SystemExit:  # argparse has printed a help
                sys.stdout.flush()
                raise
            sys.stdout.flush()  # what cannot be written is noticed here, not while Python exits
            return status
        except OutputClosed as closed:
            continue_without()
            for error in closed.args:
                if error.errno in _FULL_DISK:  # somebody reads the rest
                    report(UserError.one("output", f"cannot be written: {error.strerror}", _FILE_FIXES[error.errno]))
            return EXIT_BROKEN_PIPE


def _reported(argv: list[str]) -> int:
    """Run ``titan``, report a failure that a user can fix, and return the exit status."""
    try:
        files, rest = _plugin_files(argv)
        with using_plugin_files(files):
            return _run(rest)
    except UserError as error:
        if os.environ.get("TITAN_TRACEBACK"):
            raise
        if not reported_by_launcher():
            report(error)
        return exit_status(error)
    except KeyboardInterrupt:
        continue_without()
        if not reported_by_launcher():
            print("titan: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (OSError, UnicodeEncodeError) as error:
        mistake = _file_error(error) if isinstance(error, OSError) else locale_error(error)
        if mistake is None or os.environ.get("TITAN_TRACEBACK"):
            raise
        report(mistake)
        return EXIT_USER_ERROR


def _file_error(error: OSError) -> UserError | None:
    """Return a user error if the user can fix the failure; ``None`` for other failures."""
    fix = _FILE_FIXES.get(error.errno or 0)
    if fix is None or (error.filename is None and error.errno not in _FULL_DISK):
        return None
    where = "output" if error.filename is None else shorten(os.fsdecode(error.filename))
    return UserError.one(where, f"cannot be used: {error.strerror}", fix)


def report(error: UserError) -> None:
    """Print one line per problem. Ranks other than 0 prefix their number. The command then ends with the status of the
    problem, whether anybody reads it or not."""
    continue_without()
    rank = os.environ.get("RANK")
    prefix = "titan: error: " if rank in (None, "0") else f"titan: error: [rank {rank}] "
    notes = [f"titan: {note}" for note in getattr(error, "__notes__", ())]
    for problem in error.problems[:MOST_PROBLEMS]:
        say(f"{prefix}{redact_text(str(problem))}", file=sys.stderr)
    if (more := len(error.problems) - MOST_PROBLEMS) > 0:
        say(f"{prefix}and {more:,} more mistakes; correct these first", file=sys.stderr)
    for note in notes:
        say(note, file=sys.stderr)


def _plugin_files(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the files of the options ``--plugin`` at the beginning of ``argv``, and the arguments after these.

    Raises:
        UserError: the option has no value.
    """
    files = []
    while argv and (argv[0] == PLUGIN_OPTION or argv[0].startswith(f"{PLUGIN_OPTION}=")):
        option, equals, file = argv.pop(0).partition("=")
        if not equals:
            file = argv.pop(0) if argv else ""
        if not file or file.startswith("-"):
            raise UserError.one(f"command line: {option}", "needs a value", f"write titan {option} FILE COMMAND ...")
        files.append(file)
    return files, argv


def _run(argv: list[str]) -> int:
    if not reported_by_launcher() and os.environ.get("RANK", "0") == "0":
        check_start()
    registry = Components.from_installed()
    commands: dict[str, Command] = {}
    for command in registry.all(Command):
        commands.setdefault(command.name, command)  # the core's come first; duplicates are conflicts, reported below
    if not argv or argv[0] in (*_HELP, _HELP_ALL):
        say(listing(commands.values()) if argv[:1] == [_HELP_ALL] else overview(commands.values()))
        print_conflicts(registry, Command)
        return 0
    if argv[0] == "--version":
        say("\n".join(versions(registry)))
        return 0
    group = [command for name, command in commands.items() if name.startswith(argv[0] + " ")]
    if group and argv[0] not in commands and argv[1:2] and argv[1] in _HELP:
        say(listing(group, argv[0]))
        print_conflicts(registry, Command)
        return 0
    command, arguments = _find(commands, argv, registry)
    if command.name != "plugins":  # which lists conflicts
        registry.require_unclaimed(Command.kind, command.name)
    split = split_overrides(arguments, registry) if command.overrides else SplitArguments(arguments)
    parser = parser_of(command, commands.values(), registry)
    if command.arguments is not None:
        command.arguments.load()(parser)
    launch = LaunchOptions(parser, registry, command.name) if command.launches else None
    namespace, unknown = parser.parse_known_args(split.own)
    problems = [*split.problems, *_unknown(unknown, split.own, command, parser, registry)]
    if problems:
        raise UserError(*problems)
    if launch is not None:
        namespace.launcher = launch.requested(namespace)
    if "recipe" in namespace and namespace.recipe is None and getattr(namespace, "model", None) is None:
        namespace.recipe = default_recipe(registry)
    own = split.own if launch is None else launch.removed_from(split.own)
    in_ranks = [*command.name.split(), *own, *split.overrides]
    invocation = Invocation(namespace, registry, parse_overrides(split.overrides), split.overrides, in_ranks)
    run = command.run.load()
    gc.enable()
    try:
        status = run(invocation)
    except Exception as error:
        failure = error if isinstance(error, OSError) else named(error, registry)
        if failure is error:
            raise
        raise failure  # noqa: B904 - it has its cause
    if not isinstance(status, int):
        raise registry.origin(command).failure(f"run returned {shown(status)}; it must return the exit status")
    return status


def _unknown(
    arguments: list[str], own: list[str], command: Command, parser: CommandParser, registry: Components
) -> Iterator[Problem]:
    """Yield a problem for each argument in ``own`` that the command's parser does not know.

    After an unknown option, argparse may take its value for a positional argument. Superfluous positional arguments are
    therefore reported only if every option is known.
    """
    see = f"see `{parser.prog} --help`"
    for argument in [one for one in arguments if one.startswith("-")] or arguments:
        where = f"command line: {shorten(argument)}"
        if argument.partition("=")[0] == PLUGIN_OPTION:
            fix = f"write it before the command: titan {PLUGIN_OPTION} FILE {command.name} ..."
            yield Problem(where, f"is not an option of `{parser.prog}`", fix)
        elif not argument.startswith("-"):
            fix = without_dashes(argument, registry.sections()) if command.overrides else ""
            yield Problem(where, f"`{parser.prog}` does not expect this argument", fix or see)
        elif "." in argument.partition("=")[0] and not command.overrides:
            yield Problem(where, f"`{parser.prog}` takes no config overrides", see)
        else:
            following = next(iter(own[own.index(argument) + 1 :]), None)
            keys = registry if command.overrides else None
            yield Problem(where, "no such option", unknown_argument(argument, following, parser.option_names(), keys) or see)


def _find(commands: dict[str, Command], argv: list[str], registry: Components) -> tuple[Command, list[str]]:
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
        fix = f"did you mean `titan {quote(subcommand)}`?" if subcommand in commands else nearest(subcommand, group)
        raise UserError.one(f"titan {argv[0]} {subcommand}", "no such command", fix)
    if argv[0].startswith("-"):
        raise UserError.one(f"titan {argv[0]}", "no such option", nearest(argv[0], [*_HELP, "--version", PLUGIN_OPTION]))
    _require_installed(argv[0], provider_of_group(argv[0]), registry)
    first_words = list(dict.fromkeys(name.split()[0] for name in commands))
    raise UserError.one(f"titan {argv[0]}", "no such command", nearest(argv[0], first_words))


def _require_installed(command: str, package: str | None, registry: Components) -> None:
    """Raise if ``command`` belongs to a ``package`` that is not in use."""
    if package is not None and package not in {plugin.distribution for plugin in registry.found.plugins}:
        raise UserError.one(f"titan {command}", f"is provided by {package}", registry.remedy(package))
