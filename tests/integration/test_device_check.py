"""A device that computes wrong numbers is named on every kind of mesh, and no other one is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.quick import rows
from titan_core.api import hookimpl
from titan_core.toolkit.errors import BadDevice
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_recipe

SETTINGS: dict[str, Any] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 64}",
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "job.device": "cpu",
    "job.dump_folder": "run",
    "checkpoint.enable": "false",
    "sample.enable": "false",
}
REPLAY = {"numerics.replay_freq": 2}
P = "parallelism."
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP 2": (2, {}),
    "FSDP 3": (3, {"training.global_batch_size": 6}),
    "HSDP 2x2": (4, {f"{P}data_parallel_shard_degree": 2, f"{P}data_parallel_replicate_degree": 2}),
    "TP 2 x DP 2": (4, {f"{P}tensor_parallel_degree": 2}),
    "PP 2 x DP 2": (4, {f"{P}pipeline_parallel_degree": 2, f"{P}data_parallel_shard_degree": 2}),
    "CP 2 x DP 2": (4, {f"{P}context_parallel_degree": 2}),
}
MODEL, PP, SCHEDULE = "model.args", f"{P}pipeline_parallel_degree", f"{P}pipeline_parallel_schedule"
FOUR, TIED = SETTINGS[MODEL].replace("n_layers = 2", "n_layers = 4"), SETTINGS[MODEL][:-1] + ", tie_embeddings = true}"
SWITCHED: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP by block, compiled, bf16": (
        2,
        {f"{P}fsdp_group_mib": 0, "compile.enable": "true", "compile.backend": "aot_eager",
         "training.mixed_precision_param": "bfloat16"},
    ),
    "TP 2 x DP 2, recomputed": (4, {f"{P}tensor_parallel_degree": 2, "activation_checkpoint.mode": "full"}),
    "PP 2 x DP 2, split backward": (4, {PP: 2, SCHEDULE: "ZBVZeroBubble", "data.document_mask": "true", MODEL: FOUR}),
    "EP 2 x DP 4": (4, {"recipe": "qwen3_moe_debug", MODEL: "{dim = 32, n_layers = 2}", f"{P}expert_parallel_degree": 2}),
    "offloaded, tied": (2, {"training.enable_cpu_offload": "true", MODEL: TIED}),
}  # fmt: skip


class FlipsABit(TorchDispatchMode):
    """Flips a bit of the first element of matrix products: a faulty multiplier."""

    def __init__(self, every: int = 1, of_the_model: bool = False) -> None:
        """
        Args:
            every: which products it spoils; 1: all.
            of_the_model: whether it spares the products of whole numbers.
        """
        super().__init__()
        self.every, self.of_the_model, self.calls, self.on = every, of_the_model, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self.on and func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            local: Tensor = found.to_local() if isinstance(found, DTensor) else found
            self.calls += 1
            if self.calls % self.every == 0 and not (self.of_the_model and local.shape == (256, 256)):
                local.view(torch.int16 if local.element_size() == 2 else torch.int32).view(-1)[0] ^= 1 << 6
        return found

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        self.on = step > 2  # the trial before the first step, and the first check, find nothing


def trained(folder: str, settings: dict[str, object], bad: int | None, *of_fault: Any) -> RunRecord | tuple[str, int]:
    """Train; return the record, or the error and the exit status of this rank."""
    os.chdir(folder)
    settings = {**settings}
    recipe = str(settings.pop("recipe", "llama3_debug"))
    fault = FlipsABit(*of_fault)
    try:
        if int(os.environ["RANK"]) != bad:
            return run_recipe(recipe, {**SETTINGS, **settings}, weights=True)
        with fault:
            return run_recipe(recipe, {**SETTINGS, **settings}, weights=True, observers=[fault])
    except BadDevice as error:
        return str(error), error.exit_status


@pytest.mark.parametrize("mesh", rows(MESHES, quick=["FSDP 2", "TP 2 x DP 2"]))
def test_a_faulty_multiplier_is_named(gloo: GlooPool, tmp_path: Path, mesh: str) -> None:
    ranks, settings = MESHES[mesh]
    found = gloo.run(ranks, trained, str(tmp_path), {**settings, **REPLAY}, ranks - 1)
    assert [status for _, status in found] == [69] * (ranks - 1) + [76]
    ((message, _), *_) = found
    assert message.startswith(f"step 4: rank {ranks - 1} (")


INTERMITTENT, OF_THE_MODEL = (97, True), (1, True)


@pytest.mark.quick_rows(1)
@pytest.mark.parametrize(
    ("mesh", "fault", "named"),
    [
        ("FSDP 3", OF_THE_MODEL, "rank 2"),  # two of three are right
        ("FSDP 2", INTERMITTENT, "rank 1"),  # the one whose results change is wrong
        ("TP 2 x DP 2", INTERMITTENT, "rank 3"),
        ("PP 2 x DP 2", INTERMITTENT, "rank 3"),
        ("FSDP 2", OF_THE_MODEL, "one of ranks 0-1"),
        ("TP 2 x DP 2", OF_THE_MODEL, "one of ranks 1, 3"),
        ("PP 2 x DP 2", OF_THE_MODEL, "one of ranks 2-3"),
    ],
)
def test_a_fault_that_products_of_whole_numbers_do_not_show(
    gloo: GlooPool, tmp_path: Path, mesh: str, fault: tuple[int, bool], named: str
) -> None:
    ranks, settings = MESHES[mesh]
    found = gloo.run(ranks, trained, str(tmp_path), {**settings, **REPLAY}, ranks - 1, *fault)
    assert found[0][0].startswith(f"step 4: {named} (")


@pytest.mark.parametrize("mesh", rows({**MESHES, **SWITCHED}, quick=["FSDP 2", "TP 2 x DP 2"]))
def test_replays_change_nothing_and_find_nothing_on_good_devices(gloo: GlooPool, tmp_path: Path, mesh: str) -> None:
    ranks, settings = {**MESHES, **SWITCHED}[mesh]
    (tmp_path / "plain").mkdir()
    plain = gloo.run(ranks, trained, str(tmp_path / "plain"), settings, None)
    for replayed, one in zip(gloo.run(ranks, trained, str(tmp_path), {**settings, **REPLAY}, None), plain, strict=True):
        assert replayed.losses == one.losses and replayed.grad_norms == one.grad_norms
        assert all(torch.equal(replayed.gradients[name], tensor) for name, tensor in one.gradients.items())
        assert all(torch.equal(replayed.final[name], tensor) for name, tensor in one.final.items())
