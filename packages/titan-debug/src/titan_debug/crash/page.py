"""The page of a crash report, in Markdown. Free of torch."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from titan_core.api.tools.rank_names import ranks


@dataclass(frozen=True)
class RankCrash:
    """What one rank has to say."""

    rank: int
    world_size: int
    attempt: float
    """When the attempt at the run began, on rank 0's clock; the same on all of its ranks."""
    time: float
    """When the rank failed, in seconds since the epoch."""
    host: str
    pid: int
    step: int
    type: str
    """The exception's class."""
    message: str
    traceback: list[str]
    """Its lines, with those of the exceptions that it came from; none where the message says all."""
    follows: bool
    """Whether it only says that another rank is gone or late."""
    coordinates: dict[str, int]
    """The rank's place in the mesh."""
    environment: dict[str, str]
    command: str


@dataclass(frozen=True)
class Context:
    """What the page says of the run."""

    config: str
    """Resolved, as TOML."""
    plugins: list[dict[str, str]]
    metrics: list[str]
    """The last records, each a JSON object."""
    verdict: str
    """What the dumps of collectives and threads say, in a line; empty where there are none."""
    run: str
    """Its directory."""


def first_crashes(crashes: Sequence[RankCrash]) -> list[RankCrash]:
    """In the order in which they explain each other: failures of a rank's own, then those that follow from another's; the
    earliest first."""
    return sorted(crashes, key=lambda crash: (crash.follows, crash.time, crash.rank))


def page(crashes: Sequence[RankCrash], context: Context, unread: Collection[int] = ()) -> str:
    """The whole page.

    Args:
        crashes: of at least one rank, all of one attempt.
        unread: further ranks that have left files.
    """
    first, *others = first_crashes(crashes)
    silent = sorted(set(range(first.world_size)) - {crash.rank for crash in crashes} - set(unread))
    sections = [
        _top(first, others, silent, context),
        *([_others(others, len(unread))] if others else []),
        _block("Last records of metrics.jsonl", "json", "\n".join(context.metrics) or "(none)"),
        _block("Config", "toml", context.config.rstrip()),
        _block(
            "Plugins", "", "\n".join(f"{one['distribution']} {one['version']} ({one['name']})" for one in context.plugins)
        ),
        _block("Environment of that rank", "", "\n".join(f"{name} = {value}" for name, value in first.environment.items())),
        _block("Command line of that rank", "", first.command),
    ]
    return "\n\n".join(sections) + "\n"


def _top(first: RankCrash, others: Sequence[RankCrash], silent: Sequence[int], context: Context) -> str:
    lines = [f"# Rank {first.rank} failed in step {first.step}: {first.type}", ""]
    if first.follows:
        lines += ["This error only says that another rank is gone or late, and no rank has reported one of its own.", ""]
    if silent:
        lines += [
            f"No report from {ranks(silent)}: killed (out of memory, by a scheduler, by a signal), stuck, "
            "on a machine whose files are not here, or failed later than this page was written.",
            "",
        ]
    following = sorted(crash.rank for crash in others if crash.follows)
    if following and not first.follows:
        lines += [f"What {ranks(following)} raised follows from another rank's failure.", ""]
    if context.verdict:
        lines += [f"Collectives and threads: {context.verdict} (see `titan flight analyse {context.run}`)", ""]
    return "\n".join([*lines, *_facts(first), "", *_error(first)])


def _others(others: Sequence[RankCrash], unread: int) -> str:
    lines = ["## The other ranks"]
    if unread:
        lines += ["", f"Of {unread:,} more ranks there are files beside this page."]
    for crash in others:
        follows = ", follows from another rank's failure" if crash.follows else ""
        title = f"rank {crash.rank}: {crash.type}: {crash.message.partition(chr(10))[0]}{follows}"
        summary = title.replace("&", "&amp;").replace("<", "&lt;")
        lines += ["", "<details>", f"<summary>{summary}</summary>", "", *_facts(crash), "", *_error(crash), "", "</details>"]
    return "\n".join(lines)


def _facts(crash: RankCrash) -> list[str]:
    when = datetime.datetime.fromtimestamp(crash.time, datetime.UTC).isoformat(sep=" ", timespec="milliseconds")
    place = ", ".join(f"{dim} {index}" for dim, index in crash.coordinates.items())
    return [f"* {when}, process {crash.pid} on {crash.host}", *([f"* place in the mesh: {place}"] if place else [])]


def _error(crash: RankCrash) -> list[str]:
    if not crash.traceback:
        return [crash.message]
    return _fenced("", "\n".join(crash.traceback))


def _block(title: str, language: str, text: str) -> str:
    return "\n".join([f"## {title}", "", *_fenced(language, text)])


def _fenced(language: str, text: str) -> list[str]:
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}{language}", text, fence]
