"""``titan launch kubernetes``: a job as a JobSet, or as a PyTorchJob of Kubeflow's training operator."""

from __future__ import annotations

import argparse
from pathlib import PurePosixPath
from typing import Any

from titan_cluster import options, pods
from titan_cluster.bash import script_text
from titan_cluster.options import Machines, require_match
from titan_cluster.retries import FINAL, PREEMPTED
from titan_cluster.submission import failure, require_program, run_shown, write
from titan_cluster.training import Training, no_option, training_of
from titan_cluster.yaml_text import to_yaml
from titan_core.api import CommandContext, UserError

KINDS = ("jobset", "pytorchjob")
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan launch kubernetes``."""
    options.arguments(parser, image="container image with titan (required)")
    parser.add_argument(
        "--kind", choices=KINDS, default="jobset", metavar="KIND", help="jobset (default), or pytorchjob of Kubeflow"
    )
    parser.add_argument("--namespace", metavar="NAME", help="namespace (default: that of kubectl)")
    pods.arguments(parser)
    options.seconds_argument(parser, "after Kubernetes ends a pod")
    options.retries_argument(parser)
    options.output_arguments(parser, "kubectl create")


def run(context: CommandContext) -> int:
    """Write or submit the job.

    Raises:
        UserError: the job or an option is invalid, or kubectl fails.
    """
    given = context.arguments
    machines = options.machines(given)
    if given.image is None:
        raise UserError.one("--image", "is missing", "name a container image in which titan is installed")
    if given.namespace is not None:
        require_match("--namespace", given.namespace, _LABEL, "lower-case letters, digits and dashes", "research")
    if given.kind == "pytorchjob" and machines.elastic:
        why = "is an elastic range, which --kind pytorchjob does not support"
        raise UserError.one(f"--nodes {given.nodes}", why, "use --kind jobset, or give one number")
    pod = pods.read(given)
    training = training_of(context, machines, missing_ok=True)
    manifests = render(given, machines, training, pod)
    if given.submit:
        require_program("kubectl", "Kubernetes")
    write(to_yaml(manifests), given, training.warning)
    if given.submit:
        kubectl = ["kubectl"] if given.namespace is None else ["kubectl", "--namespace", given.namespace]
        for manifest in manifests:
            _create(kubectl, manifest)
        see = " ".join([*kubectl, "logs", "--follow", f"--selector={pods.LABEL}={training.name}", "--all-pods"])
        print(f"submitted: {given.kind} {training.name}; `{see}` follows its output")
    return 0


def _create(kubectl: list[str], manifest: dict[str, Any]) -> None:
    """Create one resource.

    Raises:
        UserError: kubectl fails, or a job of the name exists.
    """
    command = [*kubectl, "create", "--filename", "-"]
    status, output = run_shown(command, to_yaml([manifest]))
    if status == 0:
        return
    if "(AlreadyExists)" not in output:
        raise failure(command, status)
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    if kind != "ConfigMap":  # the name of a ConfigMap says what it contains, which cannot change
        remove = " ".join([*kubectl, "delete", kind.lower(), name])
        raise UserError.one(f"{kind} {name}", "exists already", f"choose another --name, or end that job with `{remove}`")


def render(given: argparse.Namespace, machines: Machines, training: Training, pod: pods.PodOptions) -> list[dict[str, Any]]:
    """Return the manifests: the recipe's, if it is a file, and the job's."""
    metadata = {"name": training.name, "labels": {pods.LABEL: training.name}}
    if given.namespace is not None:
        metadata["namespace"] = given.namespace
    make = _job_set if given.kind == "jobset" else _pytorch_job
    api, kind, spec = make(given, machines, training, pod)
    job = {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}
    if training.recipe is None:
        return [job]
    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "name": pods.recipe_map(training.name, training.recipe)},
        "immutable": True,
        "data": {training.recipe.name: training.recipe.text},
    }
    return [recipe, job]


def _job_set(
    given: argparse.Namespace, machines: Machines, training: Training, pod: pods.PodOptions
) -> tuple[str, str, dict[str, Any]]:
    """Return API version, kind and spec of a JobSet with one indexed Job: its pods keep their names when replaced."""
    host = f"{training.name}-node-0-0.{training.name}"  # JobSet's name for the first pod, in the headless service it makes
    template = pods.template(given, machines, training, pod, host, "titan")
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"containerName": "titan", "operator": "In", "values": sorted(PREEMPTED)}},
        {"action": "FailJob", "onExitCodes": {"containerName": "titan", "operator": "In", "values": sorted(FINAL)}},
    ]
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": machines.most,
        "parallelism": machines.most,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
    }
    if machines.elastic:  # pods that were never scheduled must not keep a job that has trained from completing
        job["successPolicy"] = {"rules": [{"succeededCount": machines.least}]}
    job["template"] = {**template, "spec": {**template["spec"], "restartPolicy": "Never"}}
    replicated = {"name": "node", "replicas": 1, "template": {"spec": job}}
    # A failure ends the Job, with all of its pods, and counts once, however many of them have failed.
    rule = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": training.name},
        "failurePolicy": {"maxRestarts": given.max_retries, "rules": [rule]},
        "replicatedJobs": [replicated],
    }
    return "jobset.x-k8s.io/v1alpha2", "JobSet", spec


def _pytorch_job(
    given: argparse.Namespace, machines: Machines, training: Training, pod: pods.PodOptions
) -> tuple[str, str, dict[str, Any]]:
    """Return API version, kind and spec of a PyTorchJob. Its operator makes a service for each pod."""
    template = pods.template(given, machines, training, pod, f"{training.name}-master-0", "pytorch")
    container = template["spec"]["containers"][0]
    container["command"] = [
        "/bin/sh",
        "-c",
        pods.literal(script_text("forward.sh", "pytorchjob.sh")),
        "sh",
        " ".join(map(str, sorted(FINAL))),
        " ".join(map(str, sorted(PREEMPTED))),
        str(given.max_retries),
        pods.literal(no_option(PurePosixPath(training.run, "launch"))),
        *container["command"],
    ]
    replica = {"restartPolicy": "ExitCode", "template": template}
    replicas = {"Master": {"replicas": 1, **replica}}
    if machines.most > 1:
        replicas["Worker"] = {"replicas": machines.most - 1, **replica}
    return "kubeflow.org/v1", "PyTorchJob", {"runPolicy": {"cleanPodPolicy": "None"}, "pytorchReplicaSpecs": replicas}
