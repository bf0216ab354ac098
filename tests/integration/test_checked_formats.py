"""A weight format that makes the same mistake in both directions is found by a reader that shares no code with it. The error
names plugin, format, parameters and tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from titan_core.api import ForeignTensor, UserError
from titan_models_llama import formats
from titan_testing.checks import NotTried
from titan_testing.checks.formats import LARGE_UPDATES, check_exported, check_read_elsewhere, read_by_transformers
from titan_testing.pytest_plugin import RunJob
from titan_testing.settings import SMALL

SETTINGS = {**SMALL, "model.name": "llama3"}
"""Four query heads of width 8: the weights of queries and outputs are square."""


@pytest.fixture
def run(run_job: RunJob, tmp_path: Path) -> Path:
    run_job("tiny", {**SETTINGS, **LARGE_UPDATES, "job.dump_folder": str(tmp_path / "run")})
    return tmp_path / "run"


Change = Callable[[ForeignTensor], ForeignTensor]


def _transposed(weight: str) -> Change:
    return lambda one: replace(one, transpose=one.parameter.endswith(weight))


def _exchanged(first: str, second: str) -> Change:
    def change(one: ForeignTensor) -> ForeignTensor:
        name = one.parameter.replace(first, "-").replace(second, first).replace("-", second)
        return replace(one, parameter=name)

    return change


def _halves(weight: str) -> Change:
    rows = (*range(32, 64), *range(32))
    return lambda one: replace(one, rows=rows) if one.parameter.endswith(weight) else one


def _both(one: ForeignTensor) -> ForeignTensor:
    return _transposed("wo.weight")(one) if "layers.0" in one.parameter else _halves("w1.weight")(one)


MISTAKES: dict[str, tuple[Change, str]] = {
    "transposed": (
        _transposed("wo.weight"),
        "parameters 'layers.*.attention.wo.weight' transposed (in model.layers.0.self_attn.o",
    ),
    "transposed, with rows in another order": (
        _transposed("wq.weight"),
        "tensors 'model.layers.*.self_attn.q_proj.weight' transp",
    ),
    "keys and values": (
        _exchanged("attention.wk", "attention.wv"),
        "'layers.*.attention.wk.weight' and 'layers.*.attention.wv.weight' exch",
    ),
    "gate and up": (
        _exchanged("feed_forward.w1", "feed_forward.w3"),
        "'layers.*.feed_forward.w1.weight' and 'layers.*.feed_forward.w3.weight' exchanged",
    ),
    "norms": (_exchanged("attention_norm", "ffn_norm"), "_norm.weight' exchanged"),
    "rows": (_halves("w1.weight"), "parameters 'layers.*.feed_forward.w1.weight', whose halves of rows are exchanged"),
    "two mistakes": (_both, "no single tensor, transposed or exchanged with another, explains it"),
}


def test_a_mistake_in_both_directions_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., Sequence[ForeignTensor]] = formats.hf_tensors
    for mistake, (change, error) in MISTAKES.items():
        exported = tmp_path / mistake
        monkeypatch.setattr(formats, "hf_tensors", lambda args, change=change: list(map(change, right(args))))
        assert check_exported("tiny", SETTINGS, run, exported)  # its own inverse finds nothing
        with pytest.raises(UserError) as found:
            check_read_elsewhere("tiny", SETTINGS, run, exported, read_by_transformers)
        assert (
            "plugin 'llama' (titan-models-llama 0.1.0): model 'llama3': format 'safetensors' is read by another reader as"
            in str(found.value)
        )
        assert error in str(found.value), mistake
        assert "Hugging Face" not in str(found.value) and str(tmp_path) not in str(found.value)


def test_without_another_reader_nothing_is_tried(run: Path, tmp_path: Path) -> None:
    check_exported("tiny", SETTINGS, run, tmp_path / "right")
    assert "within" in check_read_elsewhere("tiny", SETTINGS, run, tmp_path / "right", read_by_transformers)
    config = tmp_path / "right/config.json"
    for name in ("NoSuchForCausalLM", None):
        config.write_text(config.read_text().replace('"LlamaForCausalLM"', f'"{name}"' if name else ""))
        with pytest.raises(
            NotTried, match=r"no independent reader: config.json names (no class|NoSuchForCausalLM) of transformers"
        ):
            check_read_elsewhere("tiny", SETTINGS, run, tmp_path / "right", read_by_transformers)


def test_a_format_that_cannot_be_read_again_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = formats.hf_args
    monkeypatch.setattr(formats, "hf_args", lambda config: args({**config, "intermediate_size": 96}))
    with pytest.raises(UserError, match=r"plugin 'llama'.*format 'safetensors' cannot be read after Titan has written it"):
        check_exported("tiny", SETTINGS, run, tmp_path / "wrong")
