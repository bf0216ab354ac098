"""What becomes of a rendered file: it is printed, written or submitted."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_core.api import UserError


def require_program(program: str, what: str) -> None:
    """
    Raises:
        UserError: ``program``, the client of ``what``, is not installed.
    """
    if shutil.which(program) is None:
        fix = f"run this where {what} is set up, or write a file with --output and submit it there"
        raise UserError.one("--submit", f"{program} is not on the PATH", fix)


def write(text: str, given: argparse.Namespace, warning: str) -> None:
    """Write ``text`` to ``--output``; print it if there is none and the job is not submitted.

    Args:
        warning: what the user should know about the job, if anything.

    Raises:
        UserError: the file exists or cannot be written.
    """
    file: Path | None = given.output
    if warning:
        print(f"titan: warning: {warning}", file=sys.stderr)
    if file is None:
        if not given.submit:
            print(text, end="")
        return
    try:
        with file.open("w" if given.force else "x", encoding="utf-8", newline="") as opened:
            opened.write(text)
    except FileExistsError:
        raise UserError.one(str(file), "exists already", "add --force to overwrite it, or name another file") from None
    except OSError as error:
        raise UserError.one(str(file), f"cannot be written: {error.strerror or error}", "name another file") from None


def submit(command: Sequence[str], text: str | None, pattern: str, environment: Mapping[str, str] | None = None) -> str:
    """Run ``command``, show it and its output, and return the job that it names.

    Args:
        text: its standard input.
        pattern: finds the name of the job in the output, as group 1.
        environment: of the command (default: that of this process).

    Raises:
        UserError: the command fails.
    """
    status, output = run_shown(command, text, environment)
    if status != 0:
        raise failure(command, status)
    found = re.search(pattern, output)
    return found[1] if found else ""


def run_shown(command: Sequence[str], text: str | None, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run ``command``, show it and its output, and return its exit status and output.

    Args:
        text: its standard input.
        environment: of the command (default: that of this process).
    """
    print(f"titan: running: {shlex.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, input=text, stdin=subprocess.DEVNULL if text is None else None, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, encoding="utf-8", errors="backslashreplace", check=False, env=environment,
    )  # fmt: skip
    print(done.stdout, end="" if done.stdout.endswith("\n") else "\n", file=sys.stderr, flush=True)
    return done.returncode, done.stdout


def failure(command: Sequence[str], status: int) -> UserError:
    """Return the error of a command whose output was shown."""
    return UserError.one(command[0], f"failed with status {status}", "fix what its output above says")
