"""``titan launch kubernetes``: a job as a JobSet."""

from __future__ import annotations

import argparse
from typing import Any

from titan_cluster import options, pods
from titan_cluster.options import Machines, require_match
from titan_cluster.rendering import FINAL, PREEMPTED, failure, require_program, run_shown, to_yaml, write
from titan_cluster.training import Training, training_of
from titan_core.api import CommandContext, UserError
from titan_core.toolkit.text import say, shorten

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan launch kubernetes``."""
    options.arguments(parser, image="container image with titan (required)")
    parser.add_argument("--kind", default="jobset", help=argparse.SUPPRESS)
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
    if given.kind != "jobset":
        why = "is not supported: a job is a JobSet, which Kubeflow's trainer uses too"
        raise UserError.one(f"--kind {shorten(given.kind)}", why, "drop it, and install JobSet (https://jobset.sigs.k8s.io)")
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
        say(f"submitted: JobSet {training.name}; `{see}` follows its output")
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
    spec = _job_set(given, machines, training, pod)
    job = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}
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


def _job_set(given: argparse.Namespace, machines: Machines, training: Training, pod: pods.PodOptions) -> dict[str, Any]:
    """Return the spec of a JobSet with one indexed Job: its pods keep their names when replaced."""
    host = f"{training.name}-node-0-0.{training.name}"  # JobSet's name for the first pod, in the headless service it makes
    template = pods.template(given, machines, training, pod, host)
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
    return {
        "network": {"enableDNSHostnames": True, "subdomain": training.name},
        "failurePolicy": {"maxRestarts": given.max_retries, "rules": [rule]},
        "replicatedJobs": [replicated],
    }
