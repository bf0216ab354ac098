"""LoRA as an example of a third party: adapters that Titan trains are those of peft, on every mesh, and peft reads them. The
suite of the transform is in ``test_inherited_suites.py``."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from titan_core.api import UserError, matches
from titan_core.cli.main import main
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job, run_recipe
from titan_testing.meshes import CASES, merged, run_in

RECIPE = """
[model]
from_pretrained = "base"
tokenizer = "byte"
[training]
freeze = ["*"]
seq_len = 48
local_batch_size = 2
global_batch_size = 4
steps = 4
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 0
[lora]
rank = 4
alpha = 6
targets = ["*.attention.*", "*.w[12]"]
[checkpoint]
enable = true
interval = 3
[job]
device = "cpu"
dump_folder = "run"
"""
MESHES = {one.name: one for one in CASES if one.name in ("FSDP 2", "TP 2", "TP 2, no SP", "PP 2, 1F1B", "CP 2", "TP x CP")}


@pytest.fixture
def site(site_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> str:
    """A folder with the plugin, which is importable, beside a base model of transformers in ``base``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained("base")
    Path("recipe.toml").write_text(RECIPE)
    monkeypatch.syspath_prepend(site_of("titan-lora"))
    return site_of("titan-lora")


def resumed(site: str, folder: str, mesh: dict[str, object]) -> RunRecord:
    """Train the fourth step in this process."""
    sys.path.insert(0, site)
    try:
        return run_in(folder, mesh, recipe="recipe.toml")
    finally:
        sys.path.remove(site)


def in_peft(folder: str, job: Any, batches: list[Any]) -> tuple[float, dict[str, Tensor], Tensor]:
    """Return the loss of ``batches`` in peft, the gradients of its adapters by their names in Titan, and the logits of the
    first batch after the adapters were merged into the weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), folder, is_trainable=True)
    count = sum(int((batch.targets >= 0).sum()) for batch in batches)
    losses = [
        cross_entropy(model(one.tokens).logits.flatten(0, 1), one.targets.flatten(), reduction="sum") for one in batches
    ]
    loss = sum(losses, start=torch.zeros(())) / count
    loss.backward()
    (form,) = (one for one in job.family.formats if one.files == "safetensors")
    theirs = dict(model.named_parameters())
    gradients = {}
    for tensor in form.tensors.load()(job.model_args):
        for side in "AB":
            name = f"base_model.model.{tensor.name.removesuffix('.weight')}.lora_{side}.default.weight"
            if name in theirs:
                found = theirs[name].grad
                if side == "B" and tensor.rows:  # rows of a head are in another order
                    found = found.unflatten(0, (-1, len(tensor.rows)))[:, list(tensor.rows)].flatten(0, 1)
                gradients[f"{tensor.parameter.removesuffix('.weight')}.lora_{side}"] = found
    return float(loss), gradients, model.merge_and_unload()(batches[0].tokens).logits


def merged_in_titan(job: Any, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the logits of the plain model with weights ``W + alpha / rank * B A``."""
    model: Any = job.model.build()
    for name, parameter in model.named_parameters():
        adapter = [weights.get(f"{name.removesuffix('.weight')}.lora_{side}") for side in "BA"]
        parameter.data = weights[name] if None in adapter else weights[name] + 6 / 4 * adapter[0] @ adapter[1]
    for name, buffer in model.named_buffers():
        buffer.copy_(next(compute() for pattern, compute in job.model.layout.buffers.items() if matches(name, [pattern])))
    return model(tokens)


def test_adapters_are_those_of_peft_on_every_mesh(gloo: GlooPool, site: str, in_tmp: Path) -> None:
    from titan_core.data.loader import data_loader
    from titan_core.data.streams import OpenedData

    before = run_recipe("recipe.toml", {"training.stop_at_step": 3}, weights=True)
    assert {name for name, one in before.final.items() if not one.equal(before.initial[name])} == before.gradients.keys()
    assert before.gradients and all(name.endswith(("lora_A", "lora_B")) for name in before.gradients)
    assert main(["lora", "export", "run", "adapters", "--base", "base"]) == 0
    job = make_job("recipe.toml", {}, 1)
    loader = data_loader(job, OpenedData.of(job).training, 0)
    *_, batches = (loader.next_step().microbatches for _ in range(4))
    loader.close()
    loss, gradients, logits = in_peft("adapters", job, list(batches))
    torch.testing.assert_close(merged_in_titan(job, before.final, batches[0].tokens), logits, rtol=1e-4, atol=1e-5)
    for name, case in MESHES.items():
        shutil.copytree("run", name)
        record = merged(gloo.run(case.ranks, resumed, site, str(in_tmp), {**case.overrides, "job.dump_folder": name}))
        assert record.losses == pytest.approx([loss], rel=1e-5), name
        assert record.gradients.keys() == gradients.keys()
        for parameter, expected in gradients.items():
            assert (record.gradients[parameter] - expected).norm() <= 1e-5 * expected.norm(), (name, parameter)


MISTAKES: dict[str, tuple[dict[str, object], str]] = {
    "nothing": ({"lora.targets": '["*.wq", "*.query"]'}, r"lora\.targets = .*'\*\.query' matches no linear layer of blocks"),
    "nothing is frozen": ({"training.freeze": "[]"}, "training.freeze: leaves tok_embeddings.weight to train beside"),
    "float8": ({"float8.enable": "true", "float8.emulate": "true"}, "computes as Float8Linear, and an adapter needs"),
    "MXFP8": ({"mx.enable": "true", "mx.emulate": "true"}, "has the parameter 'lora_A' of another transform"),
}
REFUSED = {
    "checkpoint convert run whole": r"declares no tensor for .*lora_A.*a command of its plugin",
    "lora export run run": "run: exists already; name a new folder",
    "lora export base adapters --model.tokenizer byte": "base: has no adapters",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_error(site: str, name: str) -> None:
    settings, says = MISTAKES[name]
    with pytest.raises(UserError, match=says) as error:
        run_recipe("recipe.toml", settings)
    assert len(error.value.problems) == 1


def test_a_stored_run_computes_with_its_adapters(site: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands read them without being told, a further run starts from them, and other exports are refused."""
    trained = run_recipe("recipe.toml", {"training.steps": 1}, weights=True)
    more: dict[str, object] = {"model.from_pretrained": "run", "job.dump_folder": "more", "training.steps": 1}
    begun = run_recipe("recipe.toml", more, weights=True).initial
    assert begun.keys() == trained.final.keys() and all(one.equal(begun[name]) for name, one in trained.final.items())
    assert main(["generate", "run", "--prompt", "a", "--max-new-tokens", "2"]) == 0
    for command, says in REFUSED.items():
        assert main(command.split()) == 2
        assert re.search(says, capsys.readouterr().err), command
