"""``titan train``: one process, or many by torchrun's own launcher."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from titan_core.cli.arguments import load, parse_whole, recipe_arguments, whole
from titan_core.config.numbers import MOST_RANKS
from titan_core.config.redaction import text_without_secrets
from titan_core.errors import RunStopped, UserError
from titan_core.job.assemble import assemble

EXIT_FAILURE = 1
EXIT_PREEMPTED = 75
"""As ``sysexits.h`` has it for a failure that passes (EX_TEMPFAIL): launchers and schedulers start such a job again."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan train``."""
    recipe_arguments(parser)
    launch = parser.add_argument_group("several processes (torchrun underneath)")
    launch.add_argument("--nproc-per-node", metavar="N", help='processes on this machine, or "gpu" for one a GPU')
    launch.add_argument("--nnodes", default="1", metavar="N[:M]", help="machines, or a range of them (elastic)")
    launch.add_argument("--node-rank", default="0", metavar="K", help="number of this machine, without a rendezvous")
    launch.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where the machines meet")
    launch.add_argument(
        "--rdzv-backend", default="c10d", choices=("c10d", "static", "etcd", "etcd-v2"), help="how they meet (default: c10d)"
    )
    launch.add_argument("--rdzv-id", default="titan", metavar="ID", help="the job's name at the rendezvous")
    launch.add_argument(
        "--max-restarts", type=whole(0, 1000), default=0, metavar="N", help="restarts after a failure (default: 0)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the job, then train it here or launch the processes that do."""
    config, registry = load(arguments)
    if arguments.nproc_per_node is not None or arguments.nnodes != "1":
        from titan_core.train.launch import launch, processes

        # Checked once here, so that a mistake is told once, before any process starts.
        assemble(config, registry, processes(arguments.nproc_per_node, arguments.nnodes)).require_hardware()
        return launch(arguments)
    rank, world_size = _place_in_environment()
    job = assemble(config, registry, world_size)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_WithoutSecrets("titan: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in {plugin.module.__name__.partition(".")[0] for plugin in registry.found.plugins}:
        logging.getLogger(name).setLevel(logging.INFO if rank == 0 else logging.ERROR)

    from torch.distributed.elastic.multiprocessing.errors import record

    from titan_core.train.trainer import train

    try:
        # Under torchrun, ``record`` leaves the error where the launcher finds it.
        end = (record(train) if "TORCHELASTIC_RUN_ID" in os.environ else train)(job)
    except RunStopped as error:
        if rank == 0:
            print(f"titan: stopped: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_PREEMPTED if end is not None and end.preempted else 0


class _WithoutSecrets(logging.Formatter):
    """Logs are kept and passed on: addresses with passwords, such as a checkpoint's, are shown without them."""

    def format(self, record: logging.LogRecord) -> str:
        return text_without_secrets(super().format(record))


def _place_in_environment() -> tuple[int, int]:
    """Rank and world size as a launcher such as torchrun says; 0 of 1 without one.

    Raises:
        UserError: half of what a launcher sets, or no numbers.
    """
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return 0, 1
    here = parse_whole(rank or "", 0, MOST_RANKS - 1)
    ranks = parse_whole(world_size or "", 1, MOST_RANKS)
    if here is None or ranks is None or here >= ranks:
        raise UserError.one(
            f"environment: RANK = {rank!r}, WORLD_SIZE = {world_size!r}",
            "a launcher sets both, to whole numbers, RANK below WORLD_SIZE",
            "start with torchrun or --nproc-per-node, or unset them",
        )
    return here, ranks
