"""The Markdown page of a crash report. Imports no torch."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from shlex import quote

from titan_core.toolkit.text import ranks


@dataclass(frozen=True)
class RankCrash:
    """The failure of one rank."""

    rank: int
    world_size: int
    attempt: float
    """When the attempt at the run began, in seconds since the epoch on rank 0's clock; the same on all of its ranks."""
    time: float
    """When the rank failed, in seconds since the epoch."""
    host: str
    pid: int
    step: int
    type: str
    """The exception's class."""
    message: str
    traceback: list[str]
    """The lines of the traceback, including chained exceptions; empty if the message is sufficient."""
    follows: bool
    """Whether the exception only reports that another rank is gone or late."""
    coordinates: dict[str, int]
    """The rank's coordinate along each mesh dimension."""
    environment: dict[str, str]
    command: str


@dataclass(frozen=True)
class Context:
    """Information about the run."""

    config: str
    """The resolved config as TOML."""
    plugins: list[dict[str, str]]
    metrics: list[str]
    """The last records, one JSON object each."""
    verdict: str
    """One-line verdict over the dumps of collectives and threads; empty without dumps."""
    run: str
    """The run's directory."""


def first_crashes(crashes: Sequence[RankCrash]) -> list[RankCrash]:
    """Sort causes before consequences: first ranks that failed on their own, then ranks that failed because of another;
    each the earliest first."""
    return sorted(crashes, key=lambda crash: (crash.follows, crash.time, crash.rank))


def page(crashes: Sequence[RankCrash], context: Context, unread: Collection[int] = ()) -> str:
    """Return the page.

    Args:
        crashes: failures of one attempt, at least one.
        context: information about the run.
        unread: further ranks that left files.
    """
    first, *others = first_crashes(crashes)
    silent = sorted(set(range(first.world_size)) - {crash.rank for crash in crashes} - set(unread))
    sections = [
        _top(first, others, silent, context),
        *([_others(others, len(unread))] if others else []),
        _block("Last records of metrics.jsonl", "json", "\n".join(context.metrics) or "(none)"),
        _block("Config", "toml", context.config.rstrip()),
        _block(
            "Plugins",
            "",
            "\n".join(f"{plugin['distribution']} {plugin['version']} ({plugin['name']})" for plugin in context.plugins),
        ),
        _block(
            f"Environment of rank {first.rank}",
            "",
            "\n".join(f"{name} = {value}" for name, value in first.environment.items()),
        ),
        _block(f"Command line of rank {first.rank}", "", first.command),
    ]
    return "\n\n".join(sections) + "\n"


def _top(first: RankCrash, others: Sequence[RankCrash], silent: Sequence[int], context: Context) -> str:
    lines = [f"# Rank {first.rank} failed in step {first.step}: {first.type}", ""]
    if first.follows:
        lines += [
            "This error only reports that another rank is gone or late; no rank has reported the original failure.",
            "",
        ]
    if silent:
        lines += [
            f"No report from {ranks(silent)}. Possible reasons: killed (out of memory, by the scheduler, by a signal), "
            "stuck, report written on another machine, or failed after this page was written.",
            "",
        ]
    following = sorted(crash.rank for crash in others if crash.follows)
    if following and not first.follows:
        failed = ranks(following)
        lines += [f"{failed[0].upper()}{failed[1:]} failed as a consequence of another rank's failure.", ""]
    if context.verdict:
        lines += [f"Collectives and threads: {context.verdict} (see `titan flight analyse {quote(str(context.run))}`)", ""]
    return "\n".join([*lines, *_facts(first), "", *_error(first)])


def _others(others: Sequence[RankCrash], unread: int) -> str:
    lines = ["## Other ranks"]
    if unread:
        lines += ["", f"The directory of this page has files of {unread:,} more ranks."]
    for crash in others:
        follows = " (a consequence of another rank's failure)" if crash.follows else ""
        title = f"rank {crash.rank}: {crash.type}: {crash.message.partition(chr(10))[0]}{follows}"
        summary = title.replace("&", "&amp;").replace("<", "&lt;")
        lines += ["", "<details>", f"<summary>{summary}</summary>", "", *_facts(crash), "", *_error(crash), "", "</details>"]
    return "\n".join(lines)


def _facts(crash: RankCrash) -> list[str]:
    when = datetime.datetime.fromtimestamp(crash.time, datetime.UTC).isoformat(sep=" ", timespec="milliseconds")
    place = ", ".join(f"{dim} {index}" for dim, index in crash.coordinates.items())
    return [f"* {when}, process {crash.pid} on {crash.host}", *([f"* mesh coordinates: {place}"] if place else [])]


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
