"""``titan launch slurm``: the rendered file, run with fake programs of Slurm; with a real Slurm where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.fake_cluster import HOSTILE, FakeCluster, shellcheck
from titan_cluster.bash import script
from titan_core.cli.main import main

JOB = ["--nodes", "2", "--nproc-per-node", "1"]
SLURM = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[a-b]", "SLURM_JOB_NUM_NODES": "2"}
LAUNCH = [
    "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "nodea:22345",
    "--rdzv-id", "12345-0", "--max-restarts", "3", "--grace", "115",
]  # fmt: skip


def rendered(*arguments: str) -> Path:
    """Return the file that the command writes for a job of the harness's model, whose program is the fake one."""
    file = Path("job.sbatch").absolute()
    assert main(["launch", "slurm", *JOB, "--titan", "titan", "--force", "--output", str(file), *arguments]) == 0
    return file


def test_rendered_files_train_and_do_nothing_else(cluster: FakeCluster) -> None:
    recipe = Path("it's $(touch pwned) `touch pwned`\n-x.toml")
    text = "".join(f"# {line}\n" for hostile in HOSTILE for line in hostile.replace("\r", "").splitlines())
    text += '[model]\nname = "tiny"\n[job]\ndescription = "$(touch pwned) \'"\n'
    recipe.write_text(text)
    overrides = [f"--job.description={hostile}" for hostile in HOSTILE]
    overrides.append("--job.dump_folder=-o $(touch pwned)/'\n\"`touch pwned`")
    file = rendered(str(recipe), *overrides)
    shellcheck(file.read_bytes().decode())
    done = cluster.run(file, Path.cwd(), **SLURM)
    assert done.returncode == 0, done.stderr
    embedded = f"./{overrides[-1].partition('=')[2]}/launch/it-s-touch-pwned-touch-pwned--x.toml"
    assert cluster.calls("titan") == [["train", embedded, *overrides, *LAUNCH]]
    assert Path(embedded).read_text() == text
    assert cluster.calls("srun")[0][-len(LAUNCH) :] == LAUNCH
    assert {path.name for path in Path().iterdir()} == {recipe.name, "job.sbatch", "-o $(touch pwned)"}
    assert not list(Path().rglob("pwned"))


@settings(max_examples=40)
@given(st.lists(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])), max_size=4))
def test_bash_reads_each_value_as_it_was(values: list[str]) -> None:
    text = script({"several": values, "single": "".join(values)}, "skypilot_setup.sh").partition("\nset -e")[0]
    text += '\nprintf "%s\\0" "${several[@]}" "$single"\n'
    done = subprocess.run(["bash"], input=text.encode(), capture_output=True, check=True)
    expected = [*(values or [""]), "".join(values)]  # printf prints once without arguments
    assert done.stdout.decode() == "".join(f"{value}\0" for value in expected[0 if values else 1 :])


@pytest.mark.parametrize(
    ("status", "restarts", "state", "requeued"),
    [
        (75, 0, "RUNNING", True),  # preempted
        (75, 100, "RUNNING", True),
        (143, 100, "RUNNING", True),
        (75, 0, "COMPLETING", False),  # cancelled, or requeued by Slurm
        (1, 2, "RUNNING", True),  # a failure
        (1, 3, "RUNNING", False),
        (137, 0, "RUNNING", True),
        (69, 0, "RUNNING", True),  # a lost peer
        (2, 0, "RUNNING", False),  # a mistake in the config
        (65, 0, "RUNNING", False),  # bad numbers
        (0, 0, "RUNNING", False),
    ],
)
def test_jobs_are_requeued_by_status(cluster: FakeCluster, status: int, restarts: int, state: str, requeued: bool) -> None:
    file = rendered("tiny")
    environment = {**SLURM, "SLURM_RESTART_COUNT": str(restarts), "FAKE_STATUS": str(status), "FAKE_STATE": state}
    assert cluster.run(file, Path.cwd(), **environment).returncode == status
    assert (["requeue", "12345"] in cluster.calls("scontrol")) == requeued


def test_a_signal_before_the_time_limit_reaches_titan_and_the_job_is_requeued(cluster: FakeCluster) -> None:
    done = cluster.run(rendered("tiny"), Path.cwd(), **SLURM, FAKE_STATUS="wait")
    assert done.returncode == 75, done.stderr
    assert cluster.calls("scancel") == [["--quiet", "--signal=TERM", "12345"]]
    assert cluster.calls("scontrol")[-1] == ["requeue", "12345"]


def test_elastic_jobs_continue_without_a_lost_machine(cluster: FakeCluster) -> None:
    file = rendered("tiny", "--nodes", "1:2")
    assert "--ntasks" not in file.read_text().partition("\n\n")[0]  # Slurm would allocate one node
    assert "#SBATCH --nodes=1-2\n" in file.read_text() and "#SBATCH --no-kill\n" in file.read_text()
    shellcheck(file.read_bytes().decode())
    cluster.run(file, Path.cwd(), **SLURM)
    (call,) = cluster.calls("titan")
    assert call[call.index("--nnodes") + 1] == "1:2"
    assert {"--nodes=2", "--no-kill", "--wait=0"} <= set(cluster.calls("srun")[0])


def test_gpus_containers_and_options_of_sbatch(cluster: FakeCluster) -> None:
    options = ["--nodes", "1", "--gpus-per-node", "1", "--image", "company/titan:1 '", "--partition", "a,b", "--time", "1-0"]
    file = rendered("tiny", *options, "--sbatch=--reservation=x", "--cpus-per-node", "8", "--grace", "60")
    shellcheck(file.read_bytes().decode())
    text = file.read_text()
    for line in ("gpus-per-node=1", "partition=a,b", "time=1-0", "reservation=x", "cpus-per-task=8", "signal=B:TERM@60"):
        assert f"#SBATCH --{line}\n" in text
    assert "--exclusive" not in text
    cluster.run(file, Path.cwd(), **SLURM)
    assert cluster.calls("titan")[0][-2:] == ["--grace", "55"]  # the launcher ends before Slurm kills it
    assert {"--container-image=company/titan:1 '", f"--container-mounts={Path.cwd()}:{Path.cwd()}"} <= set(
        cluster.calls("srun")[0]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "a\n#SBATCH --wrap=x"], "must be at most 40 lower-case letters"),
        (["--partition", "a b"], "must be a name without spaces and quotes"),
        (["--account", "a\n#SBATCH --wrap=x"], "must be a name without spaces and quotes"),
        (["--qos", "'x'"], "must be a name without spaces and quotes"),
        (["--time", "tomorrow"], "must be a time limit as sbatch takes it"),
        (["--sbatch=--comment=a b"], "must be an option of sbatch without spaces and quotes"),
        (["--sbatch=--array=1-3"], "is set by titan"),
        (["--nodes", "2:1"], "the range is empty"),
        (["--nodes", "x"], "is neither a number nor a range"),
        (["--gpus-per-node", "2"], "contradicts --gpus-per-node 2"),
        (["--training.stepz", "3"], "unknown key"),
        (["--nodes", "3", "--training.global_batch_size", "16"], "must be a multiple of"),
        (["--metrics.wandb_api_key", "12345"], "unknown key"),
        (["--job.description", "https://me:hunter2@host/x"], "is a secret, which a rendered file must not contain"),
    ],
)
def test_mistakes_are_one_line_and_submit_nothing(
    cluster: FakeCluster, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", "tiny", *JOB, "--submit", *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 1 and output.out == ""
    assert "hunter2" not in output.err
    assert not cluster.calls("sbatch")


def test_a_job_is_checked_at_both_ends_of_its_range(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", "tiny", "--nodes", "1:3", "--nproc-per-node", "1"]) == 2
    assert "global_batch_size = 16: must be a multiple of" in capsys.readouterr().err


@pytest.mark.parametrize("line", ['[job]\ndescription = "https://me:hunter2@host/"\n', "# https://me:hunter2@host/\n"])
def test_recipes_with_secrets_are_refused(cluster: FakeCluster, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text(f'[model]\nname = "tiny"\n{line}')
    assert main(["launch", "slurm", "mine.toml", *JOB]) == 2
    output = capsys.readouterr()
    assert "secret" in output.err and "hunter2" not in output.err + output.out


def test_submission_shows_the_command_its_output_and_the_job(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", "tiny", *JOB, "--submit"]) == 0
    output = capsys.readouterr()
    assert output.err == "titan: running: sbatch --parsable\n42;cluster\n"
    assert output.out == "submitted: Slurm job 42; its output: tiny-42.out; the ranks': outputs/tiny/logs\n"
    assert cluster.calls("sbatch") == [["--parsable"]]
    assert main(["launch", "slurm", "tiny", *JOB]) == 0
    assert cluster.text("sbatch.stdin") == capsys.readouterr().out


def test_an_existing_file_is_kept(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    file = rendered("tiny")
    file.write_text("mine")
    assert main(["launch", "slurm", "tiny", *JOB, "--output", str(file), "--submit"]) == 2
    assert "exists already; add --force" in capsys.readouterr().err
    assert file.read_text() == "mine" and not cluster.calls("sbatch")


def test_without_slurm_submitting_says_what_to_do(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(in_tmp))
    assert main(["launch", "slurm", "tiny", *JOB, "--submit"]) == 2
    error = capsys.readouterr().err
    assert "--submit: sbatch is not on the PATH; run this where Slurm is set up" in error and error.count("\n") == 1


def test_a_failing_sbatch_is_reported(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    (cluster.folder / "sbatch").write_text("#!/bin/sh\necho 'error: invalid partition' >&2\nexit 1\n")
    assert main(["launch", "slurm", "tiny", *JOB, "--submit"]) == 2
    error = capsys.readouterr().err
    assert "error: invalid partition\n" in error and "sbatch: failed with status 1" in error


def test_a_real_slurm_accepts_the_file(in_tmp: Path) -> None:
    ping = ["scontrol", "ping"]
    if shutil.which("scontrol") is None or "is UP" not in subprocess.run(ping, capture_output=True, text=True).stdout:
        # Only Slurm knows what it accepts; docs/cluster.md says how to set one up on one machine.
        pytest.skip("no Slurm controller answers here")
    file = rendered("tiny", "--cpus-per-node", "1", "--time", "10", "--job.description", HOSTILE[4])
    done = subprocess.run(["sbatch", "--test-only", file], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
