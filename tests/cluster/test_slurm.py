"""``titan launch slurm``: the rendered file, run with fake programs of Slurm; with a real Slurm where there is one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from harness.fake_cluster import HOSTILE, FakeCluster, shellcheck
from titan_cluster.options import job_name
from titan_cluster.rendering import script
from titan_core.cli.main import main

JOB = ["--nodes", "2", "--nproc-per-node", "1"]
SLURM = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[a-b]", "SLURM_JOB_NUM_NODES": "2"}
LAUNCH = [
    "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", "nodea:22345",
    "--rdzv-id", "12345-0", "--max-restarts", "3", "--grace", "115",
]  # fmt: skip


def rendered(*arguments: str) -> Path:
    """Return the file that the command writes for a job of the harness's model, whose program is the fake one."""
    file = Path("job.sbatch").absolute()
    assert main(["launch", "slurm", *JOB, "--titan", "titan", "--force", "--output", str(file), *arguments]) == 0
    return file


def test_rendered_files_train_and_do_nothing_else(cluster: FakeCluster) -> None:
    recipe = Path("it's $(touch pwned) `touch pwned`\n-x.toml")
    # TOML allows no control characters in comments.
    lines = [re.sub(r"[\0-\x08\x0b-\x1f\x7f]", "", line) for hostile in HOSTILE for line in hostile.split("\n")]
    text = "".join(f"# {line}\n" for line in lines)
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


def test_the_machines_share_a_key_that_no_file_has(cluster: FakeCluster) -> None:
    """Each start of the job has another one."""
    file = rendered("tiny")
    for _ in range(2):
        assert cluster.run(file, Path.cwd(), **{**SLURM, "FAKE_STATUS": "0 0"}).returncode == 0
    first, second, *others = cluster.text("keys").split()
    assert first == second and re.fullmatch("[0-9a-f]{64}", first) and others == [others[0]] * 2 and others[0] != first
    assert "--export=ALL" in cluster.calls("srun")[0]  # what sbatch exports may be less
    assert not any(first in path.read_text(errors="replace") for path in Path().rglob("*") if path.is_file())


STATE = Path("outputs/tiny/launch/slurm-12345")


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("tasks", "failures", "state", "requeued", "status"),
    [
        ("75 75", 0, "RUNNING", True, 75),  # preempted
        ("75 75", 3, "RUNNING", True, 75),
        ("143 143", 3, "RUNNING", True, 143),
        ("75 75", 0, "COMPLETING", False, 75),  # cancelled, or requeued by Slurm
        ("1 1", 0, "COMPLETING", False, 1),
        ("1 1", 2, "RUNNING", True, 1),  # a failure
        ("1 1", 3, "RUNNING", False, 1),
        ("killed killed", 0, "RUNNING", True, 137),
        ("1 69", 0, "RUNNING", True, 69),  # a lost peer
        ("2 2", 0, "RUNNING", False, 2),  # a mistake in the config
        ("2 killed", 0, "RUNNING", False, 2),  # which srun hides
        ("69 2", 0, "RUNNING", False, 2),
        ("65 69", 0, "RUNNING", False, 65),  # bad numbers
        ("75 killed", 3, "RUNNING", True, 75),
        ("0 0", 0, "RUNNING", False, 0),
    ],
)
def test_jobs_are_requeued_by_status(
    cluster: FakeCluster, tasks: str, failures: int, state: str, requeued: bool, status: int
) -> None:
    file = rendered("tiny")
    STATE.mkdir(parents=True)
    (STATE / "failures").write_text(f"{failures}\n")
    (STATE / "status.7").write_text("2\n")  # of an earlier start
    environment = {**SLURM, "SLURM_RESTART_COUNT": "100", "FAKE_STATUS": tasks, "FAKE_STATE": state}
    done = cluster.run(file, Path.cwd(), **environment)
    assert done.returncode == status, done.stderr
    assert (["requeue", "12345"] in cluster.calls("scontrol")) == requeued
    if requeued:  # preemptions do not count
        assert int((STATE / "failures").read_text()) == failures + (status not in (75, 143))
    else:
        assert STATE.exists() == (state != "RUNNING")


def test_failures_are_counted_over_all_starts(cluster: FakeCluster) -> None:
    file = rendered("tiny", "--max-retries", "2")
    for status, requeues in (("1", 1), ("75", 2), ("1", 3), ("75", 4), ("1", 4)):
        cluster.run(file, Path.cwd(), **SLURM, FAKE_STATUS=status)
        assert cluster.calls("scontrol").count(["requeue", "12345"]) == requeues


def test_a_controller_that_does_not_answer_is_asked_again(cluster: FakeCluster) -> None:
    (cluster.folder / "sleep").write_text("#!/bin/sh\n")
    (cluster.folder / "sleep").chmod(0o755)
    for name in ("squeue", "scontrol"):
        program = cluster.folder / name
        refuse = f"if [[ $1 != show && $(cat {name}.tries 2>&-) != xx ]]; then printf x >> {name}.tries; exit 1; fi\n"
        head, _, body = program.read_text().partition("\n")
        program.write_text(f"{head}\n{refuse}{body}")
    done = cluster.run(rendered("tiny"), Path.cwd(), **SLURM, FAKE_STATUS="75")
    assert cluster.calls("scontrol")[-1] == ["requeue", "12345"]
    assert done.stderr.count("titan: warning: attempt 2 of 30 failed: s") == 2


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
    for tasks, status in (("0 killed", 0), ("0 2", 0), ("1 killed", 137)):  # it trained to its end on one machine, or not
        assert cluster.run(file, Path.cwd(), **SLURM, FAKE_STATUS=tasks).returncode == status


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


def test_containers_see_what_the_config_names(cluster: FakeCluster, tmp_path: Path) -> None:
    away = tmp_path / "away 'x'"
    (away / "data").mkdir(parents=True)
    Path("link").symlink_to(away / "linked")
    (away / "linked").mkdir()
    file = rendered(
        "tiny", "--image", "company/titan:1", "--mount", "/a:/b:ro", "--mount", f"{tmp_path}/more",
        "--job.dump_folder", f"{away}/run", "--job.description", "link",
    )  # fmt: skip
    shellcheck(file.read_bytes().decode())
    done = cluster.run(file, Path.cwd(), **SLURM)
    assert done.returncode == 0, done.stderr
    (mounted,) = [option for option in cluster.calls("srun")[0] if option.startswith("--container-mounts=")]
    expected = [str(Path.cwd()), "/a:/b:ro", f"{tmp_path}/more", f"{away}/run", f"{away}/linked"]
    pairs = [text if text.startswith("/a:") else f"{text}:{text}" for text in expected]
    assert mounted == f"--container-mounts={','.join(pairs)}"
    assert (away / "run").is_dir()  # Slurm refuses to mount what does not exist


@pytest.mark.quick_rows(5)
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
        (["--sbatch=--arr=1-3"], "is set by titan"),
        (["--sbatch=--export=ALL,HF_TOKEN=hunter2"], "--sbatch: contains a secret, which a rendered file must not"),
        (["--sbatch=--comment=https://me:hunter2@host/x"], "--sbatch: contains a secret"),
        (["--titan", "https://me:hunter2@host/x"], "--titan: contains a secret"),
        (["--job.description", "HF_TOKEN=hunter2 titan"], "is a secret, which a rendered file must not contain"),
        (["--mount", "/a"], "--mount: has no effect without a container"),
        (["--image", "x", "--mount", "a"], "must be an absolute path, or two and perhaps flags"),
        (["--image", "x", "--job.dump_folder", "/a:b"], "contains ',' or ':', which Slurm's --container-mounts separates"),
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


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("recipes/Llama_3.1 8B.toml", "llama-3-1-8b"),
        ("8b", "titan-8b"),
        ("a" * 50, "a" * 40),
        (f"{'a' * 39}-b", "a" * 39),  # a name must not end with a dash
    ],
)
def test_a_job_is_named_for_its_recipe(recipe: str, name: str) -> None:
    assert job_name(None, recipe) == name


def test_a_job_is_checked_at_both_ends_of_its_range(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", "tiny", "--nodes", "1:3", "--nproc-per-node", "1"]) == 2
    assert "global_batch_size = 16: must be a multiple of" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ['[job]\ndescription = "https://me:hunter2@host/"\n', "# https://me:hunter2@host/\n", '# api_key = "hunter2"\n']
)
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
    warning, shown = output.err.split("\n", 1)
    assert "the job saves nothing" in warning and shown == "titan: running: sbatch --parsable\n42;cluster\n"
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
    one = ["--nodes", "1", "--cpus-per-node", "1", "--time", "10"]
    file = rendered("tiny", *one, "--job.description", HOSTILE[4])
    done = subprocess.run(["sbatch", "--test-only", file], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
