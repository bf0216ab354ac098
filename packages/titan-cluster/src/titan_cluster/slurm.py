"""``titan launch slurm``: a job as an sbatch file, with one task for each machine, which runs titan's own launcher."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path, PurePosixPath

from titan_cluster import options
from titan_cluster.mounts import mounts
from titan_cluster.options import Machines, require_match
from titan_cluster.rendering import FINAL, PREEMPTED, Value, require_program, script, submit, write
from titan_cluster.training import Training, no_option, training_of
from titan_core.api import CommandContext, UserError
from titan_core.toolkit.arguments import integer
from titan_core.toolkit.processes import python
from titan_core.toolkit.text import say, shorten

_WORD = r"[A-Za-z0-9][A-Za-z0-9._:/@+,|&()*\[\]=-]*"
"""A value in an ``#SBATCH`` line, whose quotes, spaces and ``#`` Slurm would interpret."""
_TIME = r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED"
_OWN = frozenset({
    "job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "exclusive", "mem", "time", "output",
    "open-mode", "requeue", "no-requeue", "signal", "no-kill", "partition", "account", "qos", "array", "wrap", "chdir",
})  # fmt: skip
"""Options of sbatch that ``--sbatch`` refuses: others of ours set them, or the job needs them as they are."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan launch slurm``."""
    options.arguments(parser, image="container image for Slurm's pyxis plugin (default: run without a container)")
    parser.add_argument(
        "--mount",
        action="append",
        default=[],
        metavar="PATH[:TARGET]",
        help="mount PATH into the container; may be repeated. The working folder and the config's paths are mounted anyway",
    )
    parser.add_argument("--partition", metavar="NAME", help="partition, or several, separated by commas")
    parser.add_argument("--account", metavar="NAME", help="account to charge")
    parser.add_argument("--qos", metavar="NAME", help="quality of service")
    parser.add_argument("--time", metavar="LIMIT", help="time limit, as in 24:00:00 or 2-00:00:00")
    options.seconds_argument(parser, "before the time limit")
    parser.add_argument(
        "--cpus-per-node",
        type=integer(1, 100_000),
        metavar="C",
        help="cores of each machine (default: whole machines, with all their memory)",
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further option of sbatch, as in --sbatch=--reservation=NAME; may be repeated",
    )
    options.retries_argument(parser)
    parser.add_argument("--titan", metavar="PROGRAM", help="the program on the machines (default: this one)")
    parser.add_argument("--missing-ok", action="store_true", help="files that this machine lacks exist on the others")
    options.output_arguments(parser, "sbatch")


def run(context: CommandContext) -> int:
    """Write or submit the job.

    Raises:
        UserError: the job or an option is invalid, or sbatch fails.
    """
    given = context.arguments
    machines = options.machines(given)
    directives = _directives(given, machines)
    try:
        training = training_of(context, machines, missing_ok=given.missing_ok)
    except UserError as error:
        if any(problem.missing for problem in error.problems):
            error.add_note("if only the machines of the cluster have such files, add --missing-ok")
        raise
    text = render(given, machines, training, directives, Path.cwd())
    if given.submit:
        require_program("sbatch", "Slurm")
    write(text, given, training.warning)
    if given.submit:
        file = given.output
        # Slurm copies the script: later changes of the file do not reach the job.
        command = ["sbatch", "--parsable", *([] if file is None else [str(file.resolve())])]
        job = submit(command, text if file is None else None, r"(?m)^(\d+)(?:;.*)?$")
        say(f"submitted: Slurm job {job}; its output: {training.name}-{job}.out; the ranks': {training.run}/logs")
    return 0


def render(given: argparse.Namespace, machines: Machines, training: Training, directives: list[str], folder: Path) -> str:
    """Return the sbatch file.

    Args:
        directives: options of sbatch that the user chose.
        folder: where relative paths begin.

    Raises:
        UserError: a path cannot be mounted into the container.
    """
    # Without --ntasks-per-node, with which Slurm would allocate the fewest nodes of a range.
    nodes = f"{machines.least}-{machines.most}" if machines.elastic else str(machines.most)
    lines = [
        f"--job-name={training.name}",
        f"--nodes={nodes}",
        *directives,
        "--output=%x-%j.out",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:TERM@{given.grace}",
        *(["--no-kill"] if machines.elastic else []),
    ]
    recipes = PurePosixPath(training.run, "launch")
    recipe = training.recipe
    values: dict[str, Value] = {
        "folder": str(folder),
        "image": given.image or "",
        **_mounts(given, training, folder),
        "recipe_file": training.recipe_file(recipes),
        "recipe": "" if recipe is None else recipe.text,
        "state": no_option(recipes),
        "titan": _program(given),
        "arguments": training.arguments(recipes),
        "srun": _srun(given, machines, folder),
        "ranks": machines.ranks,
        "least": machines.least,
        "max_restarts": given.max_restarts,
        "grace": options.grace_of_ranks(given),
        "preempted": " ".join(map(str, PREEMPTED)),
        "final": " ".join(map(str, FINAL)),
        "retries": given.max_retries,
    }
    head = ["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "", "# Rendered by `titan launch slurm`.", ""]
    return "\n".join(head) + script(values, "forward.sh", "slurm.sh")


def _directives(given: argparse.Namespace, machines: Machines) -> list[str]:
    """
    Raises:
        UserError: a value cannot stand in an ``#SBATCH`` line.
    """
    lines = []
    if machines.gpus:
        lines.append(f"--gpus-per-node={machines.gpus}")
    lines += ["--exclusive", "--mem=0"] if given.cpus_per_node is None else [f"--cpus-per-task={given.cpus_per_node}"]
    for option in ("partition", "account", "qos"):
        value = getattr(given, option)
        if value is not None:
            require_match(f"--{option}", value, _WORD, "a name without spaces and quotes", "main")
            lines.append(f"--{option}={value}")
    if given.time is not None:
        require_match("--time", given.time, _TIME, "a time limit as sbatch takes it", "24:00:00")
        lines.append(f"--time={given.time}")
    for option in given.sbatch:
        require_match(
            "--sbatch", option, rf"--[a-z]+(-[a-z]+)*(={_WORD})?", "an option of sbatch without spaces and quotes",
            "--sbatch=--reservation=NAME",
        )  # fmt: skip
        name = option[2:].partition("=")[0]
        if any(own.startswith(name) for own in _OWN):  # sbatch also takes the beginning of an option's name
            raise UserError.one(f"--sbatch {shorten(option)}", "is set by titan", "use the option of `titan launch slurm`")
        lines.append(option)
    return lines


def _program(given: argparse.Namespace) -> list[str]:
    """Return the words that run ``titan`` on the machines."""
    if given.titan is not None:
        return [given.titan]
    if given.image is not None:
        return ["titan"]
    program = Path(sys.executable).with_name("titan")  # the machines share the file system of this one
    return [str(program)] if shutil.which(program) else python("-m", "titan_core")


def _mounts(given: argparse.Namespace, training: Training, folder: Path) -> dict[str, Value]:
    """Return the variables of the script that concern the mounts of a container.

    Raises:
        UserError: there is no container, or a path cannot be mounted.
    """
    if given.image is None:
        if given.mount:
            raise UserError.one("--mount", "has no effect without a container", "add --image IMAGE, or drop it")
        return {"mounts": (), "outputs": (), "inputs": ()}
    found = mounts(folder, training.config, training.run, given.mount)
    return {"mounts": found.fixed, "outputs": found.outputs, "inputs": found.inputs}


def _srun(given: argparse.Namespace, machines: Machines, folder: Path) -> list[str]:
    """Return the options of srun, without the mounts of a container."""
    # The ranks bind themselves to cores. An elastic job continues without a lost machine. Of others, the remaining tasks get
    # time to save their checkpoint and to report why they end.
    found = ["--ntasks-per-node=1", "--cpu-bind=none", "--label", "--kill-on-bad-exit=0"]
    found += ["--no-kill", "--wait=0"] if machines.elastic else [f"--wait={given.grace + 60}"]
    if given.cpus_per_node is not None:
        found.append(f"--cpus-per-task={given.cpus_per_node}")  # srun takes it from sbatch in some versions only
    if given.image is not None:
        found += [f"--container-image={given.image}", f"--container-workdir={folder}"]
    return found
