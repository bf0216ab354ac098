"""The options that start more than one process. Imports torch only to count GPUs and to start ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from titan_core.api import CommandContext, UserError
from titan_core.api.config.numbers import MOST_PROCESSES, MOST_RANKS
from titan_core.toolkit.arguments import integer, parse_integer
from titan_core.toolkit.launching import JOB_KEY, RankJob
from titan_core.toolkit.status import StatusLine, phase
from titan_core.toolkit.text import say, shorten
from titan_launch.config import NUMA_BINDING, NUMA_BINDINGS
from titan_launch.restart.policy import SAVE_SECONDS

if TYPE_CHECKING:
    from titan_launch.terminal.console import Shown

_DEFAULTS: dict[str, str | int | None] = {
    "rdzv_endpoint": None,
    "rdzv_id": "titan",
    "rdzv_timeout": 600,
    "rdzv_conf": None,
    "local_addr": None,
    "bind": None,
    "job_key_file": None,
    "elastic": "wait",
    "max_restarts": 0,
    "restart_wait": 5,
    "restart_wait_max": 300,
    "grace": SAVE_SECONDS,
    "log_dir": None,
    "tee": None,
    "numa_binding": None,
}
"""Defaults of the options that take effect only with ``--nproc-per-node`` or ``--nnodes``."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the launcher's options to those of ``titan train``."""
    launch = parser.add_argument_group("multi-process jobs")
    launch.add_argument("--nproc-per-node", metavar="N", help='processes on this machine, or "gpu" for one per GPU')
    launch.add_argument(
        "--nnodes", default="1", metavar="N[:M]", help="number of machines, or an elastic range (default: 1)"
    )
    launch.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="address where the machines meet")
    launch.add_argument("--rdzv-id", metavar="ID", help="name of the job at the rendezvous (default: titan)")
    launch.add_argument(
        "--rdzv-timeout", type=integer(1, 86_400), metavar="SECONDS", help="how long to wait for the machines (default: 600)"
    )
    launch.add_argument("--rdzv-conf", metavar="KEY=VALUE,...", help="more settings, as in last_call_timeout=5")
    launch.add_argument("--local-addr", metavar="ADDR", help="this machine's address (default: its host name)")
    launch.add_argument("--bind", metavar="ADDR", help="address to listen on (default: loopback, if there is one machine)")
    launch.add_argument(
        "--job-key-file", metavar="FILE", help=f"key that the machines share, mode 0600 (default: ${JOB_KEY})"
    )
    launch.add_argument(
        "--elastic",
        choices=("wait", "stop"),
        help="if the job cannot train on the machines that have joined: wait for more, or stop (default: wait)",
    )
    launch.add_argument(
        "--max-restarts", type=integer(0, 1000), metavar="N", help="restarts in a row without progress (default: 0)"
    )
    launch.add_argument(
        "--restart-wait",
        type=integer(0, 86_400),
        metavar="SECONDS",
        help="before the second in a row; doubles (default: 5)",
    )
    launch.add_argument(
        "--restart-wait-max", type=integer(0, 86_400), metavar="SECONDS", help="longest such wait (default: 300)"
    )
    launch.add_argument(
        "--grace",
        type=integer(1, 86_400),
        metavar="SECONDS",
        help=f"from SIGTERM, or machines that join, to SIGKILL (default: {SAVE_SECONDS})",
    )
    launch.add_argument(
        "--log-dir",
        metavar="DIR",
        help="folder for the output of each rank, rank-N.log (default: logs in the run's directory)",
    )
    launch.add_argument(
        "--tee", metavar="RANKS", help='ranks to print as well, as in "0,2-3", or "all" (default: rank 0, without prefix)'
    )
    launch.add_argument(
        "--numa-binding",
        choices=NUMA_BINDINGS,
        metavar="HOW",
        help="cores of each rank: auto (those near its GPU), node (also on the CPU: those of one NUMA node) or off "
        f"(default: ${NUMA_BINDING}, or auto)",
    )


def run(context: CommandContext, ranks: RankJob) -> int:
    """Check the job, start its ranks, and return the exit status.

    Raises:
        UserError: the options or the job contain a mistake. It is reported once, before any process starts.
    """
    given = {name: value for name, value in vars(context.arguments).items() if value is not None}
    _require_effects(given)
    from titan_launch.launch import launch
    from titan_launch.meeting.rendezvous import options_of
    from titan_launch.meeting.sizes import Sizes

    settings = argparse.Namespace(**{**_DEFAULTS, **given})
    with StatusLine() as status:
        per_node = processes_per_node(given.get("nproc_per_node"))
        least, most = machines(settings.nnodes)
        settings.shown = shown_ranks(settings.tee, per_node * most)
        sizes = Sizes(context.job) if least < most and ranks.writes_run else None
        if sizes is None and "elastic" in given:
            raise UserError.one(
                f"--elastic {given['elastic']}", "applies only to a range of machines", "add --nnodes MIN:MAX"
            )
        options = options_of(settings, least, most)
        with phase("reading the recipe"):
            # The ranks check the hardware: doing so takes a CUDA context, and thereby memory of the first GPU.
            if sizes is None:
                job = ranks.assemble(per_node * least if least == most else None)
            else:
                job, line = sizes.check(per_node, (least, most))
                say(f"titan: {line}", file=sys.stderr, flush=True)
        return launch(settings, options, per_node, context.rank_arguments, job, ranks.writes_run, status, sizes)


def _require_effects(given: dict[str, str | int]) -> None:
    """Check that each option takes effect.

    Raises:
        UserError: one does not, without another one.
    """
    one_machine = given["nnodes"] == "1"
    if one_machine and "nproc_per_node" not in given:
        _refuse(given, _DEFAULTS, "a job of several processes", "add --nproc-per-node N")
    if one_machine and "rdzv_endpoint" not in given:
        _refuse(
            given,
            ("rdzv_id", "rdzv_timeout", "rdzv_conf", "job_key_file"),
            "machines that meet",
            "add --rdzv-endpoint HOST:PORT",
        )
    if not given.get("max_restarts"):
        _refuse(given, ("restart_wait", "restart_wait_max"), "a job that is restarted", "add --max-restarts N")


def _refuse(given: dict[str, str | int], names: Iterable[str], of: str, fix: str) -> None:
    for name in names:
        if name in given:
            option = f"--{name.replace('_', '-')} {shorten(str(given[name]))}"
            raise UserError.one(option, f"applies only to {of}", fix)


def shown_ranks(tee: str | None, most: int) -> Shown:
    """Return the ranks to print.

    Args:
        most: number of ranks of the job.

    Raises:
        UserError: ``tee`` names no rank of the job.
    """
    from titan_launch.terminal.console import Shown

    if tee is None:
        return Shown(frozenset({0}))
    if tee == "all":
        return Shown(frozenset(range(most)), prefixed=True)
    found: set[int] = set()
    for part in tee.split(","):
        first, dash, second = part.partition("-")
        low = parse_integer(first, 0, most - 1)
        high = parse_integer(second, 0, most - 1) if dash else low
        if low is None or high is None or high < low:
            why = f"{shorten(part)!r} is not a rank or a range of ranks from 0 to {most - 1}"
            raise UserError.one(f"--tee {shorten(tee)}", why, "use for example --tee 0,2-3, or --tee all")
        found.update(range(low, high + 1))
    return Shown(frozenset(found), prefixed=True)


def machines(nnodes: str) -> tuple[int, int]:
    """Return the minimum and maximum number of machines.

    Raises:
        UserError: ``nnodes`` is neither a number nor a range.
    """
    first, colon, second = nnodes.partition(":")
    least = _number("--nnodes", first, MOST_RANKS)
    most = _number("--nnodes", second, MOST_RANKS) if colon else least
    if most < least:
        raise UserError.one(f"--nnodes {nnodes}", "the range is empty", "give the smaller number first")
    return least, most


def processes_per_node(text: str | None) -> int:
    """Return the number of processes to start on this machine.

    Raises:
        UserError: ``text`` is not a number, or is "gpu" on a machine without a GPU.
    """
    if text is None:
        return 1
    if text == "gpu":
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise UserError.one("--nproc-per-node gpu", "torch sees no CUDA device", "give a number")
        return count
    return _number("--nproc-per-node", text, MOST_PROCESSES)


def _number(option: str, text: str, most: int) -> int:
    number = parse_integer(text, 1, most)
    if number is None:
        raise UserError.one(f"{option} {shorten(text)}", f"must be a whole number from 1 to {most}", "use for example 2")
    return number
