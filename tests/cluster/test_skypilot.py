"""``titan launch skypilot``: the rendered task, whose script runs with a fake titan; with SkyPilot's own parser where it is
installed (``uv run --with skypilot pytest tests/cluster/test_skypilot.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.fake_cluster import HOSTILE, FakeCluster, shellcheck
from titan_core.cli.main import main

NODES = {
    "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_TASK_ID": "sky-7",
}  # fmt: skip
JOB = ["--nodes", "2", "--gpus-per-node", "2", "--gpu", "H100", "--image", "company/titan:1", "--volume", "runs:/runs"]


def rendered(*arguments: str) -> dict[str, Any]:
    file = Path("task.yaml")
    assert main(["launch", "skypilot", *JOB, "--force", "--output", str(file), *arguments]) == 0
    task: dict[str, Any] = yaml.safe_load(file.read_text())
    return task


def test_machines_train_and_do_nothing_else(cluster: FakeCluster) -> None:
    recipe = Path("it's $(touch pwned)\n-x.toml")
    text = '[model]\nname = "tiny"\n# $(touch pwned) `touch pwned` \'"\n'
    recipe.write_text(text)
    overrides = [f"--job.description={hostile}" for hostile in HOSTILE]
    overrides.append("--job.dump_folder=-o $(touch pwned)'\n\"`touch pwned`")
    task = rendered(str(recipe), *overrides)
    script = Path("run.sh")
    script.write_text(task["run"].replace("folder=/runs\n", "folder=.\n"))  # the test may not write there
    shellcheck(task["run"])
    done = cluster.run(script, Path.cwd(), **NODES)
    assert done.returncode == 0, done.stderr
    embedded = f"./{overrides[-1].partition('=')[2]}/launch/it-s-touch-pwned--x.toml"
    assert cluster.calls("titan") == [
        ["train", embedded, *overrides, "--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3",
         "--rdzv-endpoint", "10.0.0.1:29400", "--rdzv-id", "sky-7"]
    ]  # fmt: skip
    assert Path(embedded).read_text() == text
    assert not list(Path().rglob("pwned*"))


def test_the_task(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    options = ["--volume", "s3://bucket/data:/data", "--secret", "WANDB_API_KEY", "--spot", "--infra", "aws/us-east-1"]
    task = rendered("tiny", *options, "--max-retries", "5")
    assert "hunter2" not in Path("task.yaml").read_text()
    assert {key: value for key, value in task.items() if key != "run"} == {
        "name": "tiny",
        "num_nodes": 2,
        "resources": {
            "accelerators": "H100:2",
            "image_id": "docker:company/titan:1",
            "infra": "aws/us-east-1",
            "use_spot": True,
            "job_recovery": {"max_restarts_on_errors": 5, "recover_on_exit_codes": [75, 143]},
        },
        "volumes": {"/runs": "runs"},
        "file_mounts": {"/data": {"source": "s3://bucket/data", "mode": "MOUNT"}},
        "secrets": {"WANDB_API_KEY": None, "TITAN_JOB_KEY": None},
    }


def test_a_project_is_installed_by_uv(cluster: FakeCluster) -> None:
    Path("project").mkdir()
    Path("project/uv.lock").touch()
    place = JOB.index("--image")
    options = [*JOB[:place], *JOB[place + 2 :], "--workdir", "project"]
    assert main(["launch", "skypilot", "tiny", *options, "--output", "task.yaml"]) == 0
    task = yaml.safe_load(Path("task.yaml").read_text())
    assert task["workdir"] == str(Path("project").absolute())
    assert "uv sync --locked\n" in task["setup"]
    shellcheck(task["setup"])
    program = Path("project/.venv/bin/titan")
    program.parent.mkdir(parents=True)
    program.symlink_to(cluster.folder / "titan")
    script = Path("run.sh").absolute()
    script.write_text(task["run"].replace("folder=/runs\n", "folder=.\n"))
    done = cluster.run(script, Path("project"), **{**NODES, "PATH": "/usr/bin:/bin", "SKYPILOT_NUM_NODES": "1"})
    assert done.returncode == 0, done.stderr
    (call,) = cluster.calls("titan")
    assert call[:2] == ["train", "tiny"] and "--rdzv-endpoint" not in call


def test_skypilot_accepts_the_task(cluster: FakeCluster) -> None:
    # Too large to be a requirement of the tests.
    task = pytest.importorskip("sky.task", reason="skypilot is not installed")
    config = rendered("tiny", "--secret", "HF_TOKEN", *(f"--job.description={hostile}" for hostile in HOSTILE))
    run = config["run"]
    read = task.Task.from_yaml_config(config, secrets_overrides=[("HF_TOKEN", "x")])
    assert read.run == run and read.num_nodes == 2 and read.volumes == {"/runs": "runs"}
    (resources,) = read.resources
    assert resources.accelerators == {"H100": 2} and resources.job_recovery["recover_on_exit_codes"] == [75, 143]


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "1:2"], "is an elastic range"),
        (["--gpu", "a b"], "must be the name of a GPU"),
        (["--gpus-per-node", "0", "--nproc-per-node", "2"], "has no effect without GPUs"),
        (["--workdir", "x"], "--workdir and --image: are both given"),
        (["--image", "a b"], "must be a container image"),
        (["--infra", "$(x)"], "must be a cloud"),
        (["--volume", "runs:relative"], "must be the name of a volume or the address of a bucket"),
        (["--volume", "more:/runs"], "is mounted where another one is"),
        (["--volume", "s3://me:hunter2@bucket/x:/data"], "must be the name of a volume or the address"),
        (["--secret", "A=b"], "must be the name of a variable"),
        (["--secret", "NOT_SET_HERE"], "is not set in this environment; export NOT_SET_HERE"),
        (["--job.description", "https://me:hunter2@host/x"], "is a secret, which a rendered file must not contain"),
    ],
)
def test_mistakes_are_one_line_and_submit_nothing(
    cluster: FakeCluster, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "skypilot", "tiny", *JOB, "--submit", *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 1 and output.out == ""
    assert "hunter2" not in output.err
    assert not cluster.calls("sky")


def test_submission(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("TITAN_JOB_KEY", "")  # restored afterwards
    monkeypatch.delenv("TITAN_JOB_KEY")
    assert main(["launch", "skypilot", "tiny", *JOB, "--secret", "HF_TOKEN", "--submit"]) == 0
    output = capsys.readouterr()
    assert "hunter2" not in output.err
    assert output.out == "submitted: SkyPilot job 7; `sky jobs logs 7` follows its output\n"
    (call,) = cluster.calls("sky")
    assert call[:-1] == ["jobs", "launch", "--yes", "--detach-run", "--secret", "HF_TOKEN", "--secret", "TITAN_JOB_KEY"]
    assert yaml.safe_load(cluster.text("sky.file"))["secrets"] == {"HF_TOKEN": None, "TITAN_JOB_KEY": None}
    key = cluster.text("sky.key")
    assert len(key) == 64 and key not in cluster.text("sky.file")
