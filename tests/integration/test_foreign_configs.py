"""A value of a wrong type or size in a JSON file beside foreign weights is one line, or has no effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fuzz.hf_folders import CONFIG, make_folder
from titan_ckpt.stored_model import find
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_core.plugins.registry import Components

GENERATION = "generation_config.json"
VALUES = (
    '"x"', '"12"', "null", "[]", "{}", "true", "NaN", "-1", "0", "0.5", "1e400", "-Infinity", str(10**30), "9" * 4000,
    "[[1]]", '["x", null]', '"two\\nlines\\u001b[2J"', '"' + "y" * 5000 + '"', "[" * 400 + "]" * 400,
    '{"a":' * 400 + "1" + "}" * 400,
)  # fmt: skip
"""JSON texts, because Python writes neither 1e400 nor a deep nesting."""
KEYS = {
    CONFIG: (
        "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers", "vocab_size",
        "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
        "partial_rotary_factor", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "model_type",
        "architectures", "attention_dropout", "torch_dtype", "dtype", "eos_token_id", "bos_token_id", "quantization_config",
        "auto_map", "unknown", "rope_scaling.rope_type", "rope_scaling.factor", "rope_scaling.low_freq_factor",
        "rope_scaling.high_freq_factor", "rope_scaling.original_max_position_embeddings", "rope_scaling.unknown",
    ),
    GENERATION: ("eos_token_id", "bos_token_id", "temperature"),
    "params.json": (
        "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
        "rope_theta", "use_scaled_rope", "rope_scaling_factor", "max_seq_len", "unknown",
    ),
}  # fmt: skip
META = {
    "dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 300, "multiple_of": 8, "ffn_dim_multiplier": 1.3,
    "norm_eps": 1e-5, "rope_theta": 5000.0, "use_scaled_rope": True, "rope_scaling_factor": 8,
}  # fmt: skip
QUICK = {
    (CONFIG, "num_hidden_layers"),
    (CONFIG, "rope_scaling.factor"),
    (GENERATION, "eos_token_id"),
    ("params.json", "dim"),
}


def rows() -> list[object]:
    found = [(file, key) for file, keys in KEYS.items() for key in keys]
    return [pytest.param(*row, marks=[] if row in QUICK else pytest.mark.full) for row in found]


def with_value(contents: dict[str, object], key: str, value: str) -> str:
    """Return ``contents`` as JSON, with the text ``value`` at the dotted ``key``."""
    first, _, rest = key.partition(".")
    inner = contents.get(first)
    if rest:
        value = with_value(inner if isinstance(inner, dict) else {}, rest, value)
    pairs = {name: json.dumps(one) for name, one in contents.items()} | {first: value}
    return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in pairs.items()) + "}"


def make(folder: Path, file: str) -> dict[str, object]:
    """Write a folder of weights, and return the contents of ``file`` in it."""
    if file == "params.json":
        folder.mkdir()
        (folder / "consolidated.00.pth").touch()
        return META
    make_folder(folder)
    contents: dict[str, object] = json.loads((folder / CONFIG).read_text()) if file == CONFIG else {"eos_token_id": 1}
    return contents


def named_for(key: str) -> tuple[str, ...]:
    """Return what a line about ``key`` may name: the key, or the model's arguments that follow from it and others."""
    derived = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads"}
    meta = {"dim": "ffn_dim", "multiple_of": "ffn_dim", "ffn_dim_multiplier": "ffn_dim"}
    last = key.rpartition(".")[2]
    return (
        last,
        *(table[key] for table in (derived, meta) if key in table),
        *(("rope",) if last.startswith("rope") else ()),
    )


def require_one_line_each(text: str, problems: int) -> None:
    lines = text.strip().splitlines()
    assert len(lines) == problems, text
    assert "pydantic" not in text, text
    assert "\x1b" not in text, text
    assert all(len(line) < 1000 for line in lines), text


def require_one_line(error: UserError, names: tuple[str, ...], value: str) -> None:
    require_one_line_each(str(error), len(error.problems))
    assert "theirs" in error.problems[0].where
    # Nesting that is too deep for any reader is found before the keys are known.
    assert any(name in str(error) for name in (*names, "nested too deeply")), (names, value, str(error))


@pytest.mark.parametrize(("file", "key"), rows())
def test_a_wrong_value_is_one_line(in_tmp: Path, file: str, key: str) -> None:
    contents = make(in_tmp / "theirs", file)
    registry = Components.from_installed()
    refused = 0
    for value in VALUES:
        (in_tmp / "theirs" / file).write_text(with_value(contents, key, value))
        try:
            find("theirs", registry)
        except UserError as error:
            refused += 1
            require_one_line(error, named_for(key), value)
    free = ("attention_dropout", "torch_dtype", "dtype", "bos_token_id", "temperature", "max_seq_len", "rope_parameters")
    assert refused or key in free


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(
    ("file", "key", "value", "said"),
    [
        (CONFIG, "num_hidden_layers", str(10**9), "num_hidden_layers is 1000000000, and must be less than or equal to "),
        (CONFIG, "num_attention_heads", '"12"', 'num_attention_heads is "12", not a whole number above 0'),
        (GENERATION, "eos_token_id", '"x"', 'generation_config.json: eos_token_id: must be a token, or a list of them'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["check", "convert"])
def test_a_command_prints_the_line(
    in_tmp: Path, file: str, key: str, value: str, said: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = make(in_tmp / "theirs", file)
    (in_tmp / "theirs" / file).write_text(with_value(contents, key, value))
    Path("recipe.toml").write_text('[model]\nfrom_pretrained = "theirs"\n[training]\nsteps = 1\n')
    arguments = {"check": ["config", "check", "recipe.toml"], "convert": ["checkpoint", "convert", "theirs", "ours"]}
    status = main(arguments[command])
    errors = capsys.readouterr().err
    if (file, command) == (GENERATION, "convert"):  # the exported folder repeats this key, and does not use it
        assert status == 0, errors
        return
    assert status == 2, errors
    require_one_line_each(errors, 1)
    assert said in errors
