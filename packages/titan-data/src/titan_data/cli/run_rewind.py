"""``titan run rewind``: goes back to an earlier step of a run, and leaves out documents from there on."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from titan_core.api import CommandContext, UserError
from titan_core.toolkit.arguments import step_count
from titan_core.toolkit.launching import shell_command, unless_locked
from titan_core.toolkit.runs.files import CONFIG
from titan_core.toolkit.text import say
from titan_data.cli.data_step import note

_MOST_STEPS = 10_000
_SHOWN = 5


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan run rewind``."""
    parser.add_argument("run", metavar="RUN", help="run directory (job.dump_folder)")
    parser.add_argument(
        "--to", type=step_count, required=True, metavar="STEP", help="step of the checkpoint to continue from"
    )
    parser.add_argument(
        "--without-steps", action="append", default=[], metavar="A-B",
        help="pass over all documents that these later steps used; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--without-documents", nargs="+", default=[], metavar="FILE:LINE",
        help="pass over these documents, named as `titan data step` prints them",
    )  # fmt: skip


def run(context: CommandContext) -> int:
    """Rewind the run, which must not be running.

    Raises:
        UserError: the run is running, has no such checkpoint, or a document cannot be passed over from there on.
    """
    from titan_data.provenance.recorded_run import open_run
    from titan_data.provenance.rewind import documents_at, documents_in_steps, rewind

    given = context.arguments
    steps = sorted({step for text in given.without_steps for step in _steps(text, given.to)})
    with unless_locked(given.run):
        opened = open_run(context, given.run)
        found, begun = documents_in_steps(opened, given.to, steps, note)
        if steps and not found:
            why = f"earlier steps than {given.to + 1} have begun all of their {len(begun)} documents"
            raise UserError.one("--without-steps", why, "rewind to an earlier step")
        found += documents_at(opened, given.without_documents, given.to, note)
        done = rewind(context, opened, given.to, found, max(steps, default=0))
    say(f"the next start continues after step {given.to}; checkpoints and exports set aside: {len(done.aside)}")
    for path in done.aside[:_SHOWN]:
        say(f"  {path}")
    if done.documents:
        say(f"documents passed over from there on: {len(done.documents)}")
        for one in done.documents[:_SHOWN]:
            say(f"  {one.dataset}: {one.place}")
        if len(done.documents) > _SHOWN:
            say(f"  ... and {len(done.documents) - _SHOWN} more")
    if begun:
        shown = ", ".join(one.place for one in begun[:_SHOWN])
        note(f"documents that the run had begun by step {given.to}, which stay: {len(begun)} ({shown})")
    if done.again:
        note("the data has been read more than once, so earlier epochs have read some of these documents")
    say(f"continue: {shell_command(['train', str(Path(given.run) / CONFIG)])}, or as you started the run")
    return 0


def _steps(text: str, begin: int) -> range:
    """Return the steps of ``A-B``, or of ``A``.

    Raises:
        UserError: it is no range, or is not after the step to go back to.
    """
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text)
    where = f"--without-steps {text}"
    if match is None:
        raise UserError.one(where, "is no range of steps", "write A-B, such as 1204-1206")
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < first + _MOST_STEPS:
        raise UserError.one(where, f"must be a range of 1 to {_MOST_STEPS:,} steps", "write A-B, such as 1204-1206")
    if first <= begin:
        raise UserError.one(where, f"is not after step {begin}, to which the run goes back", "rewind to an earlier step")
    return range(first, last + 1)
