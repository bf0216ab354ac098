"""The workflows of GitHub: what they may do, whose code they run, and that none knows a secret."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ci.workspace import META, ROOT, distributions, packages

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
PINNED = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)+\n")
WRITES = {("release.yml", "publish"): {"id-token": "write", "attestations": "write"}}
"""The permissions of jobs that may do more than read the repository."""
MOST_JOBS = 6
"""Of a pull request."""


def parsed(name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows" / name).read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_actions_are_pinned_permissions_set_and_secrets_unknown(file: Path) -> None:
    text, workflow = file.read_text(encoding="utf-8"), parsed(file.name)
    assert len(PINNED.findall(text)) == text.count("uses:") > 0, (
        "each action by its whole commit, with the version beside it"
    )
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["permissions"] == WRITES.get((file.name, name), {"contents": "read"}), name
        assert job["timeout-minutes"] <= 360
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), "values reach a shell by its environment"
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
    assert not re.search(r"secrets\b|github\.token|GITHUB_TOKEN|password|pull_request_target", text, re.IGNORECASE)


def test_the_same_action_has_one_version() -> None:
    used = {use for file in FILES for use in re.findall(r"uses: (\S+ # \S+)", file.read_text(encoding="utf-8"))}
    assert len(used) == len({use.partition("@")[0] for use in used})


def test_a_pull_request_runs_a_handful_and_the_schedule_every_suite_on_every_python() -> None:
    jobs = parsed("ci.yml")["jobs"]
    assert sum(len(job.get("strategy", {}).get("matrix", {}).get("include", [0])) for job in jobs.values()) <= MOST_JOBS
    rows = [row for job in jobs.values() for row in job.get("strategy", {}).get("matrix", {}).get("include", [])]
    assert {row["package"] for row in rows} <= packages().keys()

    job = parsed("scheduled.yml")["jobs"]["package"]
    matrix = job["strategy"]["matrix"]
    assert job["steps"][0]["with"]["fetch-depth"] == 0, (
        "python -m ci builds the lowest versions of our packages from their tags"
    )
    assert matrix["package"] == "${{ fromJSON(needs.packages.outputs.names) }}" and "exclude" not in matrix
    assert sorted(matrix["resolution"]) == ["locked", "lowest-direct"]
    classifiers = distributions()[META].project["classifiers"]
    assert matrix["python"] == [one.rpartition(" ")[2] for one in classifiers if one.startswith("Programming Language")]


def test_a_tag_of_a_release_starts_its_publication() -> None:
    (pattern,) = parsed("release.yml")[True]["push"]["tags"]  # YAML reads the key `on` as true
    assert all(Path(f"{name}-v0.1.0").match(pattern) for name in distributions())
    publish = parsed("release.yml")["jobs"]["publish"]
    assert publish["steps"][-1] == {
        "run": "uv publish --trusted-publishing always dist/*", "env": {"UV_PUBLISH_URL": "${{ vars.PACKAGE_UPLOAD_URL }}"},
    }  # fmt: skip
    assert publish["if"] == "vars.PACKAGE_UPLOAD_URL != ''" and publish["environment"] == "release"
