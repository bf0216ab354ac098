"""The pods of a job on Kubernetes: what every pod runs, and what it may use."""

from __future__ import annotations

import argparse
import hashlib
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from titan_cluster.options import Machines, grace_of_ranks, require_match
from titan_cluster.rendering import script_text
from titan_cluster.training import RecipeText, Training
from titan_core.api import UserError
from titan_core.api.config.secrets import is_secret, redact_text
from titan_core.toolkit.arguments import integer
from titan_core.toolkit.launching import JOB_KEY
from titan_core.toolkit.text import shorten

LABEL = "app.kubernetes.io/instance"
PORT = 29400
RECIPES = "/etc/titan"
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", JOB_KEY)
"""What a pod reads from a Secret, if ``--secret`` names no keys."""
_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_QUANTITY = r"[0-9]+(\.[0-9]+)?([KMGTPE]i?|k|m)?"


@dataclass(frozen=True)
class PodOptions:
    """The options of a command that describe a pod."""

    volumes: tuple[tuple[str, str], ...]
    """PersistentVolumeClaims, and where each is mounted. The first is the working directory."""
    secrets: tuple[tuple[str, str, bool], ...]
    """Secret, key in it and name of the variable, and whether it may be missing."""
    variables: tuple[tuple[str, str], ...]
    cpus: int | None
    memory: str | None


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of pods."""
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:PATH",
        help="mount a PersistentVolumeClaim at PATH; may be repeated. The first holds the run: relative paths begin there",
    )
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME[:KEY,...]",
        help=f"set variables from the keys of a Secret (default: {', '.join(SECRETS)}, if it has them); may be repeated",
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable, no secret; may be repeated"
    )
    parser.add_argument("--cpus-per-node", type=integer(1, 100_000), metavar="C", help="cores of each pod")
    parser.add_argument("--memory-per-node", metavar="SIZE", help="memory of each pod, as in 512Gi")


def read(given: argparse.Namespace) -> PodOptions:
    """Return the options of pods.

    Raises:
        UserError: an option is not in its form, contains a secret, or there is no volume.
    """
    volumes = tuple(map(_volume, given.volume))
    if not volumes:
        why = "is missing: the run's checkpoints would be lost with the pod, and its pods would share no folder"
        raise UserError.one("--volume", why, "add --volume CLAIM:PATH, such as --volume runs:/runs")
    for what, values in (("claim", [claim for claim, _ in volumes]), ("path", [path for _, path in volumes])):
        if len(set(values)) < len(values):
            raise UserError.one("--volume", f"is given twice with the same {what}", "give each claim and path once")
    if given.memory_per_node is not None:
        require_match("--memory-per-node", given.memory_per_node, _QUANTITY, "a size as Kubernetes takes it", "512Gi")
    secrets = tuple(one for text in given.secret for one in _secrets(text))
    variables = tuple(map(_variable, given.env))
    names = [name for _, name, _ in secrets] + [name for name, _ in variables]
    for name in names:
        if names.count(name) > 1:
            raise UserError.one(f"--env and --secret {name}", "sets the variable twice", "set it once")
    return PodOptions(volumes, secrets, variables, given.cpus_per_node, given.memory_per_node)


def _volume(text: str) -> tuple[str, str]:
    claim, _, path = text.partition(":")
    where = f"--volume {shorten(text)!r}"
    if re.fullmatch(_NAME, claim) is None or not path.startswith("/") or ":" in path or path.strip("/") == "":
        raise UserError.one(where, "must be the name of a claim, a colon and an absolute path", "use for example runs:/runs")
    if path.startswith((f"{RECIPES}/", "/dev")) or path == RECIPES or not path.isprintable() or ".." in path.split("/"):
        raise UserError.one(where, "cannot be mounted there", "use for example runs:/runs")
    return claim, path


def _secrets(text: str) -> list[tuple[str, str, bool]]:
    name, colon, keys = text.partition(":")
    where = f"--secret {shorten(text)!r}"
    found = keys.split(",") if colon else list(SECRETS)
    if re.fullmatch(_NAME, name) is None or not all(re.fullmatch(_VARIABLE, key, re.ASCII) for key in found):
        why = "must be the name of a Secret, or a name, a colon and names of variables"
        raise UserError.one(redact_text(where), why, f"use for example titan:{','.join(SECRETS)}")
    return [(name, key, not colon) for key in found]


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or re.fullmatch(_VARIABLE, name, re.ASCII) is None or not _is_text(value):
        raise UserError.one(f"--env {shorten(name)!r}", "must be NAME=VALUE", "use for example --env NCCL_DEBUG=INFO")
    if is_secret(name) or redact_text(value) != value:
        why = "is a secret, which a rendered file must not contain"
        raise UserError.one(f"--env {name}", why, f"put it into a Secret, and add --secret NAME:{name}")
    return name, value


def _is_text(value: str) -> bool:
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in value)


def recipe_map(job: str, recipe: RecipeText) -> str:
    """Return the name of the ConfigMap with the recipe. Another text has another name: a later job cannot change what
    the replaced pods of this one read."""
    digest = hashlib.sha256(f"{recipe.name}\n{recipe.text}".encode()).hexdigest()
    return f"{job}-recipe-{digest[:12]}"


def literal(text: str) -> str:
    """Return ``text`` in the form in which Kubernetes leaves it alone: it expands ``$(NAME)`` in commands, arguments and
    variables, and ``$$`` is a dollar sign."""
    return text.replace("$", "$$")


def template(
    given: argparse.Namespace, machines: Machines, training: Training, pod: PodOptions, host: str
) -> dict[str, Any]:
    """Return the template of a pod, with the agent that starts the ranks of one machine.

    Args:
        host: name of the first pod, where the others meet.

    Raises:
        UserError: there are several pods, and they share no key.
    """
    nodes = f"{machines.least}:{machines.most}" if machines.elastic else str(machines.most)
    launch = ["--nnodes", nodes, "--nproc-per-node", str(machines.ranks), "--max-restarts", str(given.max_restarts)]
    launch += ["--grace", str(grace_of_ranks(given))]
    if machines.most > 1:
        if JOB_KEY not in [key for _, key, _ in pod.secrets]:
            why = f"is missing: the pods of a job share a key, ${JOB_KEY}, by which they know each other"
            made = f"kubectl create secret generic titan --from-literal={JOB_KEY}=$(openssl rand -hex 32)"
            raise UserError.one("--secret", why, f"make a Secret (`{made}`), and add --secret titan")
        launch += ["--rdzv-endpoint", f"{host}:{PORT}", "--rdzv-id", training.name]
    mounts = [{"name": f"volume-{number}", "mountPath": path} for number, (_, path) in enumerate(pod.volumes)]
    volumes: list[dict[str, Any]] = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _) in enumerate(pod.volumes)
    ]
    mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})  # NCCL's; the default of 64 MB is too small
    volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    if training.recipe is not None:
        mounts.append({"name": "recipe", "mountPath": RECIPES})
        volumes.append({"name": "recipe", "configMap": {"name": recipe_map(training.name, training.recipe)}})
    limits: dict[str, Any] = {"nvidia.com/gpu": machines.gpus} if machines.gpus else {}
    if pod.cpus is not None:
        limits["cpu"] = pod.cpus
    if pod.memory is not None:
        limits["memory"] = pod.memory
    main: dict[str, Any] = {
        "name": "titan",
        "image": given.image,
        "command": ["titan"],
        "args": [literal(argument) for argument in [*training.arguments(PurePosixPath(RECIPES)), *launch]],
        "env": [
            *({"name": name, "value": literal(value)} for name, value in pod.variables),
            *(
                {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": optional}}}
                for name, key, optional in pod.secrets
            ),
        ],
        "resources": {"limits": limits, "requests": limits} if limits else {},
        "workingDir": pod.volumes[0][1],
        "volumeMounts": mounts,
    }
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,  # training needs no access to the cluster
        "terminationGracePeriodSeconds": given.grace,
    }
    if machines.most > 1:
        wait = ["python3", "-c", literal(script_text("wait_for_rendezvous.py")), host, str(PORT)]
        spec["initContainers"] = [{"name": "wait-for-rendezvous", "image": given.image, "command": wait}]
    spec |= {"containers": [main], "volumes": volumes}
    return {"metadata": {"labels": {LABEL: training.name}}, "spec": spec}
