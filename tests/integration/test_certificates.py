"""``titan verify --certificate``, and ``titan certificate`` of recipes, runs, and weights that a bare loop trained."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from titan_core.api.config.resolved import Override
from titan_core.cli.invocation import Invocation
from titan_core.cli.main import main
from titan_core.plugins.registry import Components
from titan_debug.certificate.contents import read_certificate

pytestmark = pytest.mark.full
STEPS, RATE = 3, 2e-3


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate of the recipe ``my.toml``, which starts from the weights in ``start``."""
    folder = tmp_path_factory.mktemp("certified")
    config = LlamaConfig(
        vocab_size=288, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rope_theta=1e4, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "start")
    (folder / "my.toml").write_text(f"""
[model]
from_pretrained = "{folder}/start"
tokenizer = "byte"
[training]
steps = 10
seq_len = 32
local_batch_size = 4
global_batch_size = 4
[optimizer]
lr = {RATE}
weight_decay = 0.0
[lr_scheduler]
warmup_steps = 0
min_lr_factor = 1.0
""")
    verify = ["verify", "my.toml", "--mesh", "1", "--mesh", "tp=2", "--steps", str(STEPS), "--output", "runs"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*verify, "--certificate", "certificate.json"]) == 0
    return folder


def compared(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        status = main(["certificate", "certificate.json", *arguments, "--json"])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    rows = json.loads(printed.out)["compared"]
    return status, {row["what"]: (row["same"], row["found"]) for row in rows}


def test_the_recipe_and_its_runs(certified: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (on_mesh,) = read_certificate(certified / "certificate.json").meshes.values()
    assert 0 < on_mesh.losses < 1e-6 and 0 < on_mesh.weights < 1e-4
    status, rows = compared(certified, capsys, "my.toml")
    assert (status, rows["mesh"]) == (0, (True, "one device"))
    assert all(same for same, _ in rows.values()) and set(rows) == {"code", "config", "global batch", "data", "mesh"}
    status, rows = compared(certified, capsys, "runs/tp=2")
    assert (status, rows["mesh"], rows["initial weights"]) == (0, (True, "tp=2"), (True, "bitwise"))
    assert rows["losses"][0] and rows["losses"][1].endswith("in 3 steps")


@pytest.mark.parametrize(
    ("change", "differs", "found"),
    [
        ("--optimizer.lr=1e-3", {"config"}, "optimizer.lr: 0.001 instead of 0.002"),
        ("--optimizer.name=Muon", {"config"}, 'optimizer.name: "Muon" instead of nothing'),
        ("--training.seed=1", {"config", "data"}, "training.seed: 1 instead of nothing"),
        ("--training.global_batch_size=8", {"global batch", "data"}, "8 sequences"),
        ("--parallelism.context_parallel_degree=2", {"mesh"}, "cp=2"),
        ("--compile.enable=true", {"config"}, "compile.enable: true instead of nothing"),
        ("--metrics.log_freq=1", set(), ""),
    ],
)
def test_other_recipes(
    certified: Path, capsys: pytest.CaptureFixture[str], change: str, differs: set[str], found: str
) -> None:
    status, rows = compared(certified, capsys, "my.toml", change)
    assert {what for what, (same, _) in rows.items() if not same} == differs and status == bool(differs)
    assert not differs or any(text == found for _, text in rows.values())


def peer(folder: Path, factor: float = 1.0) -> LlamaForCausalLM:
    """Train the certificate's steps in a bare loop of PyTorch and transformers, at ``factor`` times the learning rate."""
    invocation = Invocation(
        argparse.Namespace(recipe=str(folder / "my.toml")), Components.from_installed(), [Override("metrics.log_freq", "1")]
    )
    data = invocation.read_data(invocation.job())
    model = LlamaForCausalLM.from_pretrained(folder / "start").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=factor * RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for _ in range(STEPS):
        tokens = torch.tensor(next(data).tokens.astype("int64"))
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_weights_of_another_trainer(certified: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    peer(certified).save_pretrained(tmp_path / "same")
    peer(certified, 1.01).save_pretrained(tmp_path / "rate")
    swapped = peer(certified)
    query = swapped.model.layers[0].self_attn.q_proj.weight
    query.data = query.data[[1, 0, *range(2, len(query))]]
    swapped.save_pretrained(tmp_path / "swapped")
    peer(certified).bfloat16().save_pretrained(tmp_path / "rounded")
    status, rows = compared(certified, capsys, "--weights", str(tmp_path / "same"))
    assert status == 0 and rows["weights"][0], rows
    expected = {
        "rate": "of its update away",
        "swapped": "layers.0.attention.wq.weight is ",
        "rounded": "16 bits may not resolve it",
    }
    for name, text in expected.items():
        status, rows = compared(certified, capsys, "--weights", str(tmp_path / name))
        assert status == 1 and text in rows["weights"][1], rows
    assert compared(certified, capsys, "--weights", str(tmp_path / "rate"), "--tolerance", "0.1")[0] == 0
    status, rows = compared(certified, capsys, "--weights", "start")
    assert status == 1 and "these are the initial weights" in rows["weights"][1]
    LlamaForCausalLM(LlamaConfig(**{**swapped.config.to_dict(), "intermediate_size": 48})).save_pretrained(
        tmp_path / "other"
    )
    status, rows = compared(certified, capsys, "--weights", str(tmp_path / "other"))
    assert status == 1 and "feed_forward.w1.weight: [48, 32] instead of [64, 32]" in rows["weights"][1]


def test_no_certificate(certified: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(certified)
    verify = ["verify", "my.toml", "--mesh", "dp_shard=2", "--mesh", "tp=2", "--certificate"]
    assert main([*verify, "new.json"]) == 2
    assert "says that meshes equal one device; make it the reference: --mesh 1" in capsys.readouterr().err
    assert main(["verify", "my.toml", "--mesh", "tp=2", "--certificate", "start"]) == 2
    assert "is a folder; name a file" in capsys.readouterr().err
    strict = ["verify", "my.toml", "--mesh", "tp=2", "--steps", "1", "--tolerance", "0", "--output", "strict"]
    assert main([*strict, "--certificate", "strict.json"]) == 1
    assert not (certified / "strict.json").exists()
    assert main(["certificate", "my.toml"]) == 2
    assert "my.toml" in capsys.readouterr().err
