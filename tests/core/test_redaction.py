"""Which values are removed as secrets, and which are not."""

from __future__ import annotations

import pytest

from titan_core.api.config.secrets import REDACTED, is_redacted, is_secret, redact, redact_arguments, redact_text


@pytest.mark.parametrize(
    "name",
    [
        "api_key", "apiKey", "api_keys", "API-KEY", "wandb.api_key", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID",
        "private_key_path", "hf_token", "HF_TOKEN", "token", "hfToken", "api_tokens", "secrets", "secrets.anything",
        "client_secret", "password", "db_passwd", "passphrase", "SLURM_JWT", "TORCHX_AUTH", "auth", "Authorization",
        "bearer", "credentials", "cookie", "MASTER_KEY", "ACCESS_TOKEN_2", "--x.password",
        "webhook_url", "TITAN_WEBHOOK_URL", "metrics.webhook_url", "slack.webhookUrl",
    ],
)  # fmt: skip
def test_secret_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer", "tokenizer_path", "model.tokenizer", "max_tokens", "tokens", "tokens_per_second", "num_tokens_seen",
        "loss_per_token", "eos_token_id", "pad_token", "save_traces_folder", "key", "sort_key", "text_key", "n_kv_heads",
        "num_key_value_heads", "keyboard", "monkey", "author", "authority", "NCCL_DEBUG", "SLURM_JOB_ID", "RANK", "",
        "url", "webhook_events", "enable_webhook", "base_url",
    ],
)  # fmt: skip
def test_names_that_are_not_secret(name: str) -> None:
    assert not is_secret(name)


def test_values_of_any_type_are_removed_by_key_and_section() -> None:
    config = {
        "wandb": {
            "api_keys": ["s3cret", "s3cret"], "api_key": 123456, "password": 3.25, "use_auth": True, "token": "",
            "project": "p", "headers": {"Authorization": "Bearer s3cret"},
        },
        "secrets": {"any": "s3cret", "number": 123456, "deep": {"er": ["s3cret"]}, "list": [{"a": "s3cret"}]},
        "data": {"mixture": [{"path": "https://user:s3cret@host/a", "hf_token": "s3cret", "weight": 0.5}]},
        "model": {"tokenizer": "byte", "tokenizer_path": "a/b", "key": 7},
    }  # fmt: skip
    shown = redact(config)
    assert "s3cret" not in str(shown) and "123456" not in str(shown) and "3.25" not in str(shown)
    assert shown["model"] == config["model"]
    assert shown["wandb"] == {
        "api_keys": REDACTED, "api_key": REDACTED, "password": REDACTED, "use_auth": True, "token": "", "project": "p",
        "headers": {"Authorization": REDACTED},
    }  # fmt: skip
    assert shown["secrets"] == {"any": REDACTED, "number": REDACTED, "deep": {"er": REDACTED}, "list": REDACTED}
    assert shown["data"] == {"mixture": [{"path": f"https://{REDACTED}@host/a", "hf_token": REDACTED, "weight": 0.5}]}
    assert config["wandb"]["api_key"] == 123456  # the argument is unchanged


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("get https://user:s3c@ret@host:80/a?b=1 now", "get https://(redacted)@host:80/a?b=1 now"),
        ("https://s3cret@host/a", "https://(redacted)@host/a"),
        ("postgres://user:s3cret@host and redis://:s3cret@host", "postgres://(redacted)@host and redis://(redacted)@host"),
        (
            "https://host/a?n=1&access_token=s3cret&sig=s3cret#x",
            "https://host/a?n=1&access_token=(redacted)&sig=(redacted)#x",
        ),
        ("{'Authorization': 'Basic s3cretS3cret=='}", "{'Authorization': '(redacted)'}"),
        ("the header was Bearer s3cret.s3cret", "the header was Bearer (redacted)"),
        ("ssh://git@host/a s3://bucket/a@b https://host:80/a@b me@host", None),
        ("tcp://10.0.0.1:29500, ratio 3:1 @ 5", None),
    ],
)
def test_passwords_within_strings(text: str, shown: str | None) -> None:
    assert redact_text(text) == (text if shown is None else shown)


def test_command_arguments() -> None:
    given = [
        "titan", "train", "r.toml", "--wandb.api_key", "s3cret", "--x.password=s3cret", "--secrets.any", "s3cret",
        "--model.args", "{api_key = 's3cret'}", "--data.path=https://user:s3cret@host", "https://user:s3cret@host",
        "API_KEY=s3cret", "--model.tokenizer", "byte", "--training.max_tokens", "7", "--model.args", "{dim = 32}",
    ]  # fmt: skip
    shown = redact_arguments(given)
    assert "s3cret" not in str(shown) and len(shown) == len(given)
    assert shown[-6:] == given[-6:] and shown[:4] == given[:4]


_SECRET = "s3cret-Xy_9"
_FORMS = [
    # URLs: user, query, fragment, a path alone (as HTTP clients report it), a name in another encoding
    "https://u:{}@host/x?token=t", "https://{}@host/x", "s3://key:{}@bucket/x", "git+https://{}@host/x.git",
    "https://host/x?token={}", "https://host/x?a=1&api_key={}#top", "https://host/x#access_token={}&a=1",
    "https://host/x?X-Amz-Signature={}", "https://host/x?key={}", "Max retries exceeded with url: /x?a=1&token={}",
    "https://host/x?to%6ben={}", "HTTPS://u:{}@host",
    # environments and commands
    "HF_TOKEN={}", "ALL,HF_TOKEN={},A=1", 'export WANDB_API_KEY="{} {}"', "env PGPASSWORD='{}' psql", "password={}",
    "host=h user=u password={} port=1", "--sbatch=--export=ALL,HF_TOKEN={}", "--set=site.api_key={}",
    # headers
    "Authorization: Bearer {}", "authorization: Basic {}==", "Proxy-Authorization: Digest u='a', response={}",
    "Authorization: AWS4-HMAC-SHA256 Credential={}/x, Signature={}", "X-Api-Key: {}", "x-api-key:{}", "Private-Token: {}",
    "Cookie: a=1; session={}", "Set-Cookie: id={}; Secure", "curl -H 'X-Auth-Token: {}' https://host",
    # JSON and Python
    '{{"password": "{}"}}', "{{'hf_token': '{}', 'a': 1}}", '{{"a": {{"secret": "{}"}}}}', '"{{\\"api_key\\": \\"{}\\"}}"',
    '{{"X-Api-Key":"{}"}}', "{{'Authorization': 'Bearer {}'}}", "[{{url = 'https://u:{}@host'}}]", "{{api_key = '{}'}}",
    'api_key = "{}"', 'password="it\'s {}"', "password='{}", 'password="a \\"{}\\" b"',
]  # fmt: skip
"""Texts with a secret, as users and libraries write them."""


@pytest.mark.parametrize("form", _FORMS)
def test_every_form_in_every_place(form: str) -> None:
    """No place depends on what surrounds the text: a URL with a query is no option with a value."""
    text = form.format(*[_SECRET] * form.count("{}"))
    places: dict[str, object] = {
        "two words": redact_arguments(["titan", "train", "--job.description", text, "--training.steps", "3"]),
        "one word": redact_arguments(["titan", f"--job.description={text}"]),
        "a word": redact_arguments([text]),
        "a value of a secret": redact_arguments(["--site.api_key", text]),
        "a config, or variables": redact({"job": {"description": text, "list": [text, {"a": text}]}, "TITAN_X": text}),
        "an error": redact_text(f"ConnectionError: cannot read {text}\nat line 3"),
    }
    assert [place for place, shown in places.items() if _SECRET in str(shown)] == []
    once = redact_text(text)
    assert redact_text(once) == once and is_redacted(once)
    assert "3" in places["two words"] and "--job.description" in places["two words"]  # type: ignore[operator]


@pytest.mark.parametrize(
    "text",
    [
        "--optimizer.lr=3e-4", "next_token = logits.argmax()", "if token == end: return", "def read(token: int) -> None:",
        "HF_TOKEN=$HF_TOKEN", "{'pad_token': '<s>', 'max_tokens': 3}", "auth-token:v1", "a key: x, model.key=7",
        "step=3 loss=2.5 tokens=7", "--secret: is missing", "https://host/x?page=2&sort=key#part", "one-sided: 3", "s3://bucket/a=1/b=2",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_text(text) == text and redact({"a": text}) == {"a": text}


def test_text_before_an_equals_sign_is_no_option() -> None:
    shown = redact_arguments(["--job.description", f"https://u:{_SECRET}@host/x?token=t"])
    assert shown == ["--job.description", "https://(redacted)@host/x?token=(redacted)"]


def test_a_long_text_is_read_in_linear_time() -> None:
    for part in ("a", "a-", "a=", "'a", "x-a:", "cookie:", "://a:", "?a=&", "%", "\\'", "bearer "):
        redact_text(part * 30_000)
