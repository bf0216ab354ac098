"""The cache of derivations: a job is described without torch, and a damaged or outdated file is never used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_models_hf import cache
from titan_models_hf.config import FLAVORS, HFArgs
from titan_models_hf.derive import all_by_pattern, by_pattern, derive

DEBUG = FLAVORS["debug"]

SCRIPT = """
import sys
from titan_models_hf.layout import define
from titan_models_hf.config import FLAVORS
definition = define(FLAVORS["debug"])
assert definition.num_params > 100_000 and definition.flops_per_token(128) > 1e6
print(sorted({"torch", "transformers"} & sys.modules.keys()))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache._facts_of.cache_clear()
    return tmp_path / "titan" / "models-hf"


def test_a_derived_model_is_described_without_torch(folder: Path) -> None:
    cache.facts_of(DEBUG)
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout.strip() == "[]"


def test_the_cache_has_what_is_derived(folder: Path) -> None:
    first = cache.facts_of(DEBUG)
    cache._facts_of.cache_clear()
    assert cache.facts_of(DEBUG) == first == derive(DEBUG)
    (file,) = folder.glob("*.json")
    changed = json.loads(file.read_text())
    changed["max_seq_len"] = 7
    file.write_text(json.dumps(changed))
    cache._facts_of.cache_clear()
    assert cache.facts_of(DEBUG).max_seq_len == 7, "the file was not read"


def test_a_damaged_file_is_derived_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = cache.facts_of(DEBUG)
    (file,) = folder.glob("*.json")
    file.write_text(file.read_text()[:100])
    cache._facts_of.cache_clear()
    assert cache.facts_of(DEBUG) == first
    assert "is damaged" in caplog.text


def test_other_arguments_have_another_file(folder: Path) -> None:
    cache.facts_of(DEBUG)
    other = HFArgs(architecture="qwen3", config={**DEBUG.config, "num_hidden_layers": 1})
    assert cache.facts_of(other).num_blocks == 1
    assert len(list(folder.glob("*.json"))) == 2


def test_floating_point_operations_are_those_of_the_formula() -> None:
    found = derive(DEBUG)
    block = 128 * 32 * (4 + 2 + 2 + 4) + 3 * 128 * 384
    scores = 12 * 4 * 32 * 100
    assert found.flops_per_token(100) == 6 * (4 * block + 288 * 128) + 4 * scores


def test_blocks_share_patterns() -> None:
    values = {f"m.layers.{n}.{leaf}": leaf for n in range(30) for leaf in ("norm.weight", "a.norm.weight")}
    values["m.layers.3.norm.weight"] = "other"
    values["m.norm.weight"] = "last"
    found = by_pattern(values, "m.layers")
    assert len(found) < 40
    from titan_core.api import matches

    for name, value in values.items():
        assert next(one for pattern, one in found.items() if matches(name, [pattern])) == value


def test_patterns_of_some_names_match_no_others() -> None:
    everything = [f"layers.{n}.{leaf}" for n in range(8) for leaf in ("mlp", "mlp.down")]
    assert all_by_pattern([name for name in everything if name.endswith("mlp")], everything, "layers") == ("layers.*.mlp",)
    some = ["layers.1.mlp", "layers.5.mlp"]
    assert set(all_by_pattern(some, everything, "layers")) == set(some)
