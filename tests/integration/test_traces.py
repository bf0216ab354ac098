"""What an estimate records of a step: which collectives pass tensors on, and which operators compilers do not see."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from harness.fake_cuda import FakeCuda
from titan_testing.jobs import make_job

pytest.importorskip("titan_simulate")

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from titan_simulate.estimate.work import Work

P = "parallelism."
JOB: dict[str, object] = {
    "model.args": "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}",
    "training.seq_len": 64,
    "training.global_batch_size": -1,
    "training.mixed_precision_param": "bfloat16",
}
RING = {P + "context_parallel_degree": 2, P + "context_parallel_rotate_method": "alltoall"}


def traced(settings: dict[str, object], world_size: int, recipe: str = "llama3_debug") -> list[Work]:
    """Return the trace of a step of a recipe, all modules of which a compiler would compile."""
    from titan_core.loop.training import train
    from titan_simulate.engine.simulate import SETTINGS, simulate
    from titan_simulate.estimate.trace import Trace

    trace = Trace(lambda module: True)
    with tempfile.TemporaryDirectory() as folder:
        more = {"training.steps": 1, "job.dump_folder": folder, **SETTINGS, **JOB, **settings}
        simulate(make_job(recipe, more, world_size, missing_ok=True), train, observers=[trace], strict=False)
    return trace.work


def test_ring_attention_passes_tensors_on_and_compilers_do_not_see_its_merges(fake_cuda: FakeCuda) -> None:
    trace = fake_cuda.call(traced, RING, 2)
    exchanges = [work for work in trace if "alltoall" in work.name]
    assert exchanges and all(work.permutes for work in exchanges)
    merges = [work for work in trace if "logaddexp" in work.name or "lerp" in work.name]
    assert len(merges) == 4 and not any(work.compiled for work in merges)
    assert any(work.compiled for work in trace if "silu" in work.name)


def test_the_hooks_of_fsdp_are_not_compiled(fake_cuda: FakeCuda) -> None:
    trace = fake_cuda.call(traced, {}, 4)
    hooks = [work for work in trace if work.name.startswith(("fsdp::", "c10d::"))]
    assert hooks and not any(work.compiled for work in hooks)


def exchanges_of_experts(of_torch: bool) -> list[Work]:
    """Return the trace of a model with experts on two ranks, which torch's own function exchanges if ``of_torch``."""
    from torch.distributed import _functional_collectives

    from titan_experts import dispatch

    def exchange(rows: Tensor, received: list[int], sent: list[int], mesh: DeviceMesh, beside: Any = None) -> Tensor:
        arriving = _functional_collectives.all_to_all_single_autograd(rows, received, sent, mesh)
        if beside is not None:
            beside()
        return arriving

    with pytest.MonkeyPatch.context() as patch:
        if of_torch:
            patch.setattr(dispatch, "exchange_rows", exchange)
        args = "{n_layers = 1, n_shared_experts = 1}"
        return traced({"model.args": args, P + "expert_parallel_degree": 2}, 2, "qwen3_moe_tiny")


@pytest.mark.parametrize("of_torch", [False, True])
def test_what_experts_compute_waits_for_their_rows(fake_cuda: FakeCuda, of_torch: bool) -> None:
    """What torch's own exchange returns waits when it is read, which no operator shows; estimates never waited."""
    pytest.importorskip("titan_experts")
    trace = fake_cuda.call(exchanges_of_experts, of_torch)
    forward = [work for work in trace if work.phase == "forward"]
    exchanged = [number for number, work in enumerate(trace) if "all_to_all" in work.name and work.phase == "forward"]
    _counts, there, back = exchanged
    waits = [work.after for work in forward if work.kind.name == "WAIT"]
    assert [there] in map(list, waits) and [back] in map(list, waits)
    shared = [number for number, work in enumerate(trace) if work.module.endswith("shared.w2") and work in forward]
    assert shared and there < shared[0] < back
    if not of_torch:
        (waited,) = (number for number, work in enumerate(trace) if work.kind.name == "WAIT" and work.after == (there,))
        assert shared[0] < waited < back


def types_of_matmuls() -> list[str]:
    """Return the types of matmuls of all formats, in which CUDA devices compute."""
    import torch
    import torch.nn.functional as F

    from titan_simulate.engine.fake_device import FakeDevice
    from titan_simulate.engine.host_waits import HostWaits
    from titan_simulate.engine.observation import Observation
    from titan_simulate.estimate.trace import Trace

    trace = Trace()
    observation = Observation([trace])
    observation.enter("forward")
    kinds: Any = torch.bfloat16, torch.float16, torch.float32
    with FakeDevice(HostWaits(), observation.seen):
        for kind in kinds:
            a, b = (torch.empty(64, 64, dtype=kind, device="cuda") for _ in range(2))
            torch.mm(a, b)
        torch.set_float32_matmul_precision("high")
        torch.mm(a, b)
        a, b = (torch.empty(128, 128, dtype=torch.float8_e4m3fn, device="cuda") for _ in range(2))
        whole = [torch.empty((), device="cuda") for _ in range(2)]
        torch._scaled_mm(a, b.t(), *whole, out_dtype=torch.bfloat16)
        blocks = [torch.empty(128 * 4, dtype=torch.float8_e8m0fnu, device="cuda") for _ in range(2)]
        torch._scaled_mm(a, b.t(), *blocks, out_dtype=torch.bfloat16)
        torch._scaled_mm(a, b.t(), scale_a=blocks[0], scale_b=blocks[1], out_dtype=torch.bfloat16)
        a, b = (torch.empty(128, 64, dtype=torch.uint8, device="cuda").view(torch.float4_e2m1fn_x2) for _ in range(2))
        scales = [[torch.empty(128 * 8, dtype=torch.float8_e4m3fn, device="cuda"), one] for one in whole]
        kinds = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        order = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
        F.scaled_mm(a, b.t(), scales[0], kinds, scales[1], kinds, order, order)
    assert (trace.work[-1].sizes, trace.work[-1].flops) == ((1, 128, 128, 128), 2 * 128**3)
    return [work.type for work in trace.work if work.kind == "matmul"]


def test_the_format_of_its_factors_and_scales_decides_the_rate_of_a_matmul(fake_cuda: FakeCuda) -> None:
    types = fake_cuda.call(types_of_matmuls)
    assert types == ["bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "mxfp8", "nvfp4"]
