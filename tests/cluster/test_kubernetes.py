"""``titan launch kubernetes``: the manifests against Kubernetes' schemas, and what its containers would run."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import example, given, settings, strategies as st

from harness.fake_cluster import HOSTILE, FakeCluster
from titan_cluster.pods import literal
from titan_cluster.rendering import script_text, to_yaml
from titan_core.cli.main import main

JOB = ["--nodes", "2", "--gpus-per-node", "2", "--image", "company/titan:1", "--volume", "runs:/runs",
       "--secret", "titan"]  # fmt: skip
SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = "1.33"


def rendered(*arguments: str) -> list[dict[str, Any]]:
    """Return the manifests that the command writes, which match their schemas."""
    file = Path("job.yaml")
    assert main(["launch", "kubernetes", *JOB, "--force", "--output", str(file), *arguments]) == 0
    manifests = list(yaml.safe_load_all(file.read_text()))
    for manifest in manifests:
        check(manifest)
    return manifests


def check(manifest: dict[str, Any]) -> None:
    metadata = manifest["metadata"]
    match manifest["kind"]:
        case "JobSet":
            jsonschema.validate(manifest, json.loads((SCHEMAS / "jobset.json").read_text()))
            for replicated in manifest["spec"]["replicatedJobs"]:
                check({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, **replicated["template"]})
        case _:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a pod of a JobSet."""
    spec: dict[str, Any] = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return spec


def expanded(text: str, variables: dict[str, str]) -> str:
    """Return an argument as Kubernetes expands it: ``$(NAME)``, and ``$$`` for a dollar sign."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]),
        text,
        flags=re.DOTALL,
    )


def test_containers_receive_each_argument_as_it_was(cluster: FakeCluster) -> None:
    recipe = Path("it's $(HOME)\n.toml")
    text = '[model]\nname = "tiny"\n# $(HOME) \'"\n' + "".join(f"# {one}\n" for one in HOSTILE[5:9])
    recipe.write_text(text)
    overrides = [f"--job.description={hostile}" for hostile in (*HOSTILE, "$", "$$", "$(A", "$$(A)", "$$$(HOME)")]
    config, job = rendered(str(recipe), *overrides)
    assert config["data"] == {"it-s-HOME.toml": text}
    main_ = pod_of(job)["containers"][0]
    words = [expanded(word, {"HOME": "/root", "A": "b"}) for word in [*main_["command"], *main_["args"]]]
    assert words == [
        "titan", "train", "/etc/titan/it-s-HOME.toml", *overrides, "--job.dump_folder=outputs/it's $(HOME)\n",
        "--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3", "--grace", "115",
        "--rdzv-endpoint", "it-s-home-node-0-0.it-s-home:29400", "--rdzv-id", "it-s-home",
    ]  # fmt: skip


@settings(max_examples=100)
@given(st.text(st.characters(blacklist_categories=["Cs"]) | st.sampled_from("\n\r\t\x85\u2028\u2029\ufeff #-:")))
@example("a\x85b\u2028c\n")
@example("a\u2029b\ufeffc\n")
@example("\0\x01\x1b\x7f\x80\x9f\n")
def test_yaml_and_kubernetes_return_any_text(text: str) -> None:
    document = {"command": [text], "key": text}
    written = to_yaml([document])
    assert yaml.safe_load(written) == document
    # Parsers differ in what else ends a line or disappears.
    assert not set(written) - {"\n"} & {chr(code) for code in (*range(32), *range(127, 160), 0x2028, 0x2029, 0xFEFF)}
    assert expanded(literal(text), {"": "x", text: "y"}) == text


@pytest.mark.parametrize(
    "word", ["y", "N", "on", "null", "~", "1e3", "0o7", "1_000", "12:30", "", " x", "=", "<<", "- a", "2026-01-01"]
)
def test_words_that_parsers_take_for_other_types_are_quoted(word: str) -> None:
    assert to_yaml([{"key": word}]) == f'key: "{word}"\n'


def test_kubectl_reads_what_was_written(cluster: FakeCluster) -> None:
    kubectl = shutil.which("kubectl", path=os.environ["PATH"].partition(os.pathsep)[2])
    if kubectl is None:
        pytest.skip("kubectl is not installed, and nothing else reads YAML as Kubernetes does")
    manifests = rendered("tiny", *(f"--job.description={hostile}" for hostile in (*HOSTILE, "y", "1e3", "~")))
    command = [kubectl, "label", "--local", "--filename", "job.yaml", "--output", "json", "read=yes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "KUBECONFIG": os.devnull})
    read = json.loads(done.stdout)
    assert read["metadata"]["labels"].pop("read") == "yes"
    assert [read] == manifests


def test_pods_share_what_ranks_need_and_hold_no_secret(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    options = ["--volume", "data:/data", "--secret", "more:A_TOKEN", "--env", "NCCL_DEBUG=$(INFO)"]
    (job,) = rendered("tiny", *options, "--cpus-per-node", "16", "--memory-per-node", "64Gi", "--namespace", "research")
    assert "hunter2" not in Path("job.yaml").read_text()
    assert job["metadata"]["namespace"] == "research"
    pod = pod_of(job)
    (container,) = pod["containers"]
    assert container["workingDir"] == "/runs"
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/runs", "/data", "/dev/shm"}
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2, "cpu": 16, "memory": "64Gi"}
    variables = {one["name"]: one.get("value") or one["valueFrom"]["secretKeyRef"] for one in container["env"]}
    assert variables == {
        "NCCL_DEBUG": "$$(INFO)",
        "HF_TOKEN": {"name": "titan", "key": "HF_TOKEN", "optional": True},
        "WANDB_API_KEY": {"name": "titan", "key": "WANDB_API_KEY", "optional": True},
        "TITAN_JOB_KEY": {"name": "titan", "key": "TITAN_JOB_KEY", "optional": True},
        "A_TOKEN": {"name": "more", "key": "A_TOKEN", "optional": False},
    }


def test_failed_pods_are_replaced_by_status(cluster: FakeCluster) -> None:
    (job,) = rendered("tiny", "--max-retries", "4")
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    # A failed pod fails the Job, and the JobSet starts it again: a failure that ends all pods counts once.
    assert spec["backoffLimit"] == 0 and spec["template"]["spec"]["restartPolicy"] == "Never"
    assert job["spec"]["failurePolicy"] == {
        "maxRestarts": 4,
        "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    actions = {
        status: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for status in rule.get("onExitCodes", {}).get("values", ["disruption"])
    }
    assert actions["disruption"] == actions[75] == actions[143] == "Ignore"
    assert actions[2] == actions[65] == "FailJob"
    assert 1 not in actions and 69 not in actions  # counts


def test_elastic_jobs(cluster: FakeCluster) -> None:
    (job,) = rendered("tiny", "--nodes", "2:4", "--training.global_batch_size", "32")
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["parallelism"] == 4 and spec["successPolicy"] == {"rules": [{"succeededCount": 2}]}
    arguments = pod_of(job)["containers"][0]["args"]
    assert arguments[arguments.index("--nnodes") + 1] == "2:4"


def test_one_machine_waits_for_no_other(cluster: FakeCluster) -> None:
    (job,) = rendered("tiny", "--nodes", "1")
    assert "rdzv" not in json.dumps(job) and "initContainers" not in json.dumps(job)


def test_other_pods_wait_until_the_first_one_listens(tmp_path: Path) -> None:
    wait = [sys.executable, "-c", script_text("wait_for_rendezvous.py")]
    subprocess.run([*wait, f"{socket.gethostname()}.job", "1"], check=True)  # the first pod itself
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    with subprocess.Popen([*wait, "127.0.0.1", port], stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline().startswith(f"waiting for 127.0.0.1:{port}: ")
        with socket.create_server(("127.0.0.1", int(port))):
            assert waiting.wait(60) == 0


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "pytorchjob"], "--kind pytorchjob: is not supported: a job is a JobSet"),
        (["--name", "A"], "must be at most 40 lower-case letters"),
        (["--namespace", "a b"], "must be lower-case letters, digits and dashes"),
        (["--volume", "runs"], "must be the name of a claim, a colon and an absolute path"),
        (["--volume", "runs:/dev/shm"], "cannot be mounted there"),
        (["--volume", "runs:/other"], "is given twice with the same claim"),
        (["--secret", "a b"], "must be the name of a Secret"),
        (["--env", "HF_TOKEN=hunter2"], "is a secret, which a rendered file must not contain"),
        (["--env", "URL=https://me:hunter2@host"], "is a secret, which a rendered file must not contain"),
        (["--env", "OPTIONS=-a HF_TOKEN=hunter2"], "--env OPTIONS: is a secret, which a rendered file must not contain"),
        (["--image", "https://me:hunter2@host/x"], "--image: contains a secret, which a rendered file must not"),
        (["--env", "X"], "must be NAME=VALUE"),
        (["--env", "HF_HOME=/x", "--env", "HF_HOME=/y"], "sets the variable twice"),
        (["--memory-per-node", "much"], "must be a size as Kubernetes takes it"),
        (["--job.description", "https://me:hunter2@host/x"], "is a secret, which a rendered file must not contain"),
    ],
)
def test_mistakes_are_one_line_and_submit_nothing(
    cluster: FakeCluster, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "kubernetes", "tiny", *JOB, "--submit", *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 1 and output.out == ""
    assert "hunter2" not in output.err
    assert not cluster.calls("kubectl")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--image", "--image: is missing"),
        ("--volume", "--volume: is missing"),
        ("--secret", "--secret: is missing: the pods of a job share a key, $TITAN_JOB_KEY"),
    ],
)
def test_what_a_pod_cannot_do_without(option: str, message: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = JOB.index(option)
    assert main(["launch", "kubernetes", "tiny", *JOB[:place], *JOB[place + 2 :]]) == 2
    assert message in capsys.readouterr().err


def test_the_name_of_a_config_map_says_what_it_contains(cluster: FakeCluster) -> None:
    recipe, names = Path("my.toml"), []
    for text in ('[model]\nname = "tiny"\n', '[model]\nname = "tiny"\n# changed\n', '[model]\nname = "tiny"\n'):
        recipe.write_text(text)
        config, job = rendered("my.toml", "--name", "same")
        assert config["immutable"] is True
        name = config["metadata"]["name"]
        assert {"name": "recipe", "configMap": {"name": name}} in pod_of(job)["volumes"]
        names.append(name)
    assert names[0] == names[2] != names[1] and re.fullmatch(r"same-recipe-[0-9a-f]{12}", names[0])


def test_submission(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.toml").write_text('[model]\nname = "tiny"\n')
    assert main(["launch", "kubernetes", "my.toml", *JOB, "--submit"]) == 0
    output = capsys.readouterr()
    assert cluster.calls("kubectl") == [["create", "--filename", "-"]] * 2
    assert output.out.startswith("submitted: JobSet my; `kubectl logs --follow ")
    assert main(["launch", "kubernetes", "my.toml", *JOB]) == 0
    read, shown = cluster.text("kubectl.stdin"), capsys.readouterr().out
    assert list(yaml.safe_load_all(read)) == list(yaml.safe_load_all(shown))


def test_an_existing_job_is_kept(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.toml").write_text('[model]\nname = "tiny"\n')
    job = ["launch", "kubernetes", "my.toml", *JOB, "--namespace", "a", "--submit"]
    kubectl = cluster.folder / "kubectl"
    kubectl.write_text(kubectl.read_text() + 'echo "Error from server (AlreadyExists): it already exists" >&2; exit 1\n')
    assert main(job) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        "titan: error: JobSet my: exists already; choose another --name, or end that job with "
        "`kubectl --namespace a delete jobset my`"
    )
    assert len(cluster.calls("kubectl")) == 2  # an existing ConfigMap is the same one
    kubectl.write_text("#!/bin/sh\necho 'no such server'\nexit 1\n")
    assert main(job) == 2
    assert "kubectl: failed with status 1" in capsys.readouterr().err
