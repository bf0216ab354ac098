"""What the commands take for a secret, wherever in a rendered file it would be."""

from __future__ import annotations

import argparse

import pytest

from titan_cluster.secrets import secrets_in_options, secrets_in_overrides, secrets_in_recipe
from titan_core.api.config.resolved import Override


@pytest.mark.parametrize(
    "line",
    [
        '# api_key = "hunter2"',
        "#api-key='hunter2'",
        '# "hf_token" = "hunter2"',
        "# password: hunter2",
        "# password = hunter2  # of the test account",
        "# HF_TOKEN=hunter2 titan train my.toml",
        '# auth = {user = "me"}',
        "# api_keys = [ 'hunter2' ]",
        '# api_key = """hunter2"""',
        "# a = 1, token = 'hunter2'",
        "# https://me:hunter2@host/",
        "# Authorization: Bearer hunter2hunter2",
        "# export HF_TOKEN='hunter2",
    ],
)
def test_comments_and_texts_with_secrets(line: str) -> None:
    (problem,) = secrets_in_recipe("my.toml", f"[job]\n{line}\n")
    assert problem.where == "my.toml:2" and "hunter2" not in str(problem)


@pytest.mark.parametrize(
    "line",
    [
        "# hf_token: set it in the environment",
        "# one token = a word, or a part of one",
        "# api_key = $WANDB_API_KEY",
        '# api_key = "..."',
        '# api_key = "" # see "the vault"',
        "# token = <yours>",
        "# use_auth = true",
        "# WANDB_API_KEY comes from the environment: see docs",
        "# max_tokens = 5, tokenizer = 'x', key = 'x'",
        "# tokens per second: 3e5; https://host/path",
    ],
)
def test_prose_and_placeholders_are_none(line: str) -> None:
    assert not list(secrets_in_recipe("my.toml", f"[job]\n{line}\n"))


def test_values_are_named_by_their_keys() -> None:
    problems = list(secrets_in_recipe("my.toml", '# token = "b"\n[a]\ntoken = "x"\nc = "token=z"\n[b.auth]\nuser = "y"\n'))
    assert [problem.where for problem in problems] == ["my.toml: a.token", "my.toml: a.c", "my.toml: b.auth.user"]


def test_a_long_line_is_read_in_linear_time() -> None:
    """Quadratic patterns would take hours."""
    for part in ("a", "a=", " ", "token='' "):
        assert not list(secrets_in_recipe("my.toml", f"# {part * 100_000}\n"))


def test_options_and_overrides() -> None:
    given = argparse.Namespace(
        sbatch=["--export=ALL,HF_TOKEN", "--export=ALL,HF_TOKEN=hunter2"], titan="https://me:hunter2@host/titan",
        recipe="x.toml", name=None, max_restarts=3, secret=["a-token:KEY"], volume=["my-secret:/x"], image="auth-token:v1",
    )  # fmt: skip
    found = list(secrets_in_options(given))
    assert [problem.where for problem in found] == ["command line: --sbatch", "command line: --titan"]
    overrides = [Override("job.description", "HF_TOKEN=hunter2"), Override("a.token", "x"), Override("job.description", "x")]
    found += secrets_in_overrides(overrides)
    assert [problem.where for problem in found[2:]] == ["command line: --job.description", "command line: --a.token"]
    assert "hunter2" not in str(found)
