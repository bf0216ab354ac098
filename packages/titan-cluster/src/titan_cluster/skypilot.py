"""``titan launch skypilot``: a job as a SkyPilot task, which runs on any cloud that SkyPilot supports."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any

from titan_cluster import options
from titan_cluster.options import Machines, require_match
from titan_cluster.rendering import PREEMPTED, require_program, script, script_text, submit, to_yaml, write
from titan_cluster.training import Training, training_of
from titan_core.api import CommandContext, Problem, UserError
from titan_core.toolkit.launching import JOB_KEY
from titan_core.toolkit.text import say, shorten

_PATH = r"/[A-Za-z0-9._/-]+"
"""A path in a task, in whose other keys SkyPilot expands variables."""
_VOLUME = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_BUCKET = r"[a-z0-9]+://[A-Za-z0-9][A-Za-z0-9._/-]*"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan launch skypilot``."""
    options.arguments(parser, image="container image with titan (default: install the project in --workdir)")
    parser.add_argument("--gpu", metavar="TYPE", help="type of the GPUs, as in H100 (see `sky gpus list`)")
    parser.add_argument(
        "--infra", metavar="WHERE", help="cloud, and perhaps region, as in aws/us-east-1 (default: cheapest)"
    )
    parser.add_argument("--spot", action="store_true", help="use spot machines")
    parser.add_argument(
        "--workdir", metavar="DIR", type=Path, help="project with a uv.lock that contains titan; copied to the machines"
    )
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="SOURCE:PATH",
        help="mount a SkyPilot volume, or a bucket (s3://...), at PATH; may be repeated. Relative paths begin in the first, "
        "a volume, which holds the run",
    )
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="set a variable from the environment of the submission, such as WANDB_API_KEY; may be repeated",
    )
    options.retries_argument(parser)
    options.output_arguments(parser, "sky jobs launch")


def run(context: CommandContext) -> int:
    """Write or submit the job.

    Raises:
        UserError: the job or an option is invalid, or sky fails.
    """
    given = context.arguments
    machines = options.machines(given)
    if machines.most > 1 and JOB_KEY not in given.secret:  # the launchers know each other by it
        given.secret = [*given.secret, JOB_KEY]
    task = _task(given, machines)
    training = training_of(context, machines, missing_ok=True)
    text = to_yaml([{"name": training.name, **task, "run": _run(given, machines, training)}])
    if given.submit:
        environment = {JOB_KEY: token_hex(32), **os.environ}  # sky reads secrets there
        missing = [name for name in given.secret if name not in environment]
        if missing:
            problems = [Problem(f"--secret {name}", "is not set in this environment", f"export {name}") for name in missing]
            raise UserError(*problems)
        require_program("sky", "SkyPilot")
    write(text, given, training.warning)
    if given.submit:
        secrets = [word for name in given.secret for word in ("--secret", name)]
        with tempfile.TemporaryDirectory(prefix="titan-launch-") as folder:
            file = given.output
            if file is None:
                file = Path(folder, "task.yaml")
                file.write_text(text, encoding="utf-8")
            command = ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, str(file.resolve())]
            job = submit(command, None, r"[Jj]ob ID: (\d+)", environment)
        say(f"submitted: SkyPilot job {job or training.name}; `sky jobs logs {job}` follows its output".rstrip())
    return 0


def _task(given: argparse.Namespace, machines: Machines) -> dict[str, Any]:
    """Return the task, without its name and what it runs.

    Raises:
        UserError: an option is invalid or missing.
    """
    if machines.elastic:
        why = "is an elastic range, but SkyPilot starts and replaces all machines of a job together"
        raise UserError.one(f"--nodes {given.nodes}", why, "give one number")
    if machines.gpus and given.gpu is None:
        raise UserError.one("--gpu", "is missing", "name the type of the GPUs, as in --gpu H100")
    if given.gpu is not None and not machines.gpus:
        raise UserError.one(f"--gpu {shorten(given.gpu)}", "has no effect without GPUs", "add --gpus-per-node G, or drop it")
    if (given.workdir is None) == (given.image is None):
        why = "are both given" if given.image is not None else "are both missing"
        raise UserError.one("--workdir and --image", why, "give --workdir with titan in its uv.lock, or an image with titan")
    resources: dict[str, Any] = {
        "job_recovery": {"max_restarts_on_errors": given.max_retries, "recover_on_exit_codes": sorted(PREEMPTED)},
        "use_spot": given.spot,
    }
    if machines.gpus:
        require_match("--gpu", given.gpu, r"[A-Za-z0-9][A-Za-z0-9._-]*", "the name of a GPU", "H100")
        resources["accelerators"] = f"{given.gpu}:{machines.gpus}"
    else:
        resources["cpus"] = f"{machines.ranks}+"
    if given.infra is not None:
        resources["infra"] = require_match(
            "--infra", given.infra, r"[a-z0-9*][A-Za-z0-9*./_:-]*", "a cloud", "aws/us-east-1"
        )
    if given.image is not None:
        require_match("--image", given.image, r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "a container image", "company/titan:1")
        resources["image_id"] = f"docker:{given.image.removeprefix('docker:')}"
    task: dict[str, Any] = {"num_nodes": machines.most, "resources": resources, **_mounts(given)}
    for name in given.secret:
        require_match("--secret", name, r"[A-Za-z_][A-Za-z0-9_]*", "the name of a variable", "WANDB_API_KEY")
    if given.secret:
        task["secrets"] = dict.fromkeys(given.secret)  # `sky --secret NAME` adds the value, which no file has
    if given.workdir is not None:
        task |= {"workdir": _project(given.workdir), "setup": script_text("skypilot_setup.sh")}
    return task


def _mounts(given: argparse.Namespace) -> dict[str, Any]:
    """Return the volumes and buckets of a task.

    Raises:
        UserError: one is not in its form, or none can hold the run.
    """
    if not given.volume:
        why = "is missing: the run's checkpoints would be lost with the machine, and the machines would share no folder"
        raise UserError.one("--volume", why, "add --volume NAME:PATH, such as --volume runs:/runs (see `sky volumes`)")
    volumes: dict[str, str] = {}
    buckets: dict[str, Any] = {}
    for text in given.volume:
        source, _, path = text.rpartition(":")
        where = f"--volume {shorten(text)!r}"
        is_bucket = re.fullmatch(_BUCKET, source) is not None
        if re.fullmatch(_PATH, path) is None or not (is_bucket or re.fullmatch(_VOLUME, source)):
            why = "must be the name of a volume or the address of a bucket, a colon and an absolute path"
            raise UserError.one(where, why, "use for example runs:/runs")
        if path in volumes or path in buckets:
            raise UserError.one(where, "is mounted where another one is", "give each its own path")
        if is_bucket and not volumes:
            why = "is a bucket, which cannot hold a run: its files can neither be locked nor appended to"
            raise UserError.one(where, why, "give a volume first (see `sky volumes`)")
        if is_bucket:
            buckets[path] = {"source": source, "mode": "MOUNT"}
        else:
            volumes[path] = source
    return {"volumes": volumes, **({"file_mounts": buckets} if buckets else {})}


def _project(folder: Path) -> str:
    """
    Raises:
        UserError: the folder has no locked project, or SkyPilot would expand its name.
    """
    if not (folder / "uv.lock").is_file():
        raise UserError.one(
            f"--workdir {shorten(str(folder))!r}", "contains no uv.lock", "name a project that uv has locked"
        )
    path = str(folder.resolve())
    if "$" in path or "~" in path:
        raise UserError.one(f"--workdir {path!r}", "contains '$' or '~', which SkyPilot expands", "use a link to it")
    return path


def _run(given: argparse.Namespace, machines: Machines, training: Training) -> str:
    """Return the script that each machine runs."""
    recipes = PurePosixPath(training.run, "launch")
    recipe = training.recipe
    return script(
        {
            "folder": given.volume[0].rpartition(":")[2],
            "project": "" if given.workdir is None else "uv",
            "recipe_file": training.recipe_file(recipes),
            "recipe": "" if recipe is None else recipe.text,
            "titan": ["titan"],
            "arguments": training.arguments(recipes),
            "ranks": machines.ranks,
            "max_restarts": given.max_restarts,
        },
        "skypilot.sh",
    )
