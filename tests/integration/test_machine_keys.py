"""Every figure that describes a machine changes some estimate: none is read and then ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from harness.fake_cuda import FakeCuda
from titan_core.api import UserError
from titan_testing.jobs import make_job

pytest.importorskip("titan_simulate")

P = "parallelism."
SMALL: dict[str, object] = {
    # Matmuls for which tiles of each width are the fastest.
    "model.args": "{dim = 256, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 3072}",
    "training.seq_len": 512,
    "training.local_batch_size": 4,
    "training.global_batch_size": -1,
    P + "fsdp_group_mib": 0.0,
}
BF16 = {**SMALL, "training.mixed_precision_param": "bfloat16"}
JOBS: dict[str, tuple[dict[str, object], int]] = {
    "two nodes": ({**BF16, P + "tensor_parallel_degree": 2, "compile.enable": "true"}, 16),
    "eager": ({**BF16, "compile.enable": "false"}, 2),
    "fp32": (SMALL, 1),
    "tf32": ({**SMALL, "training.float32_matmul_precision": "high"}, 1),
    "float8": ({**BF16, "float8.enable": "true", "compile.enable": "true"}, 1),
    "offload": ({**BF16, "training.enable_cpu_offload": "true"}, 2),
}
ONLY_NAMES = {"name", "attention.kernel"}
"""Keys that no figure follows from."""
OF_FLASH = {f"attention.flash.{key}" for key in ("forward_tflops", "backward_tflops", "causal")}
"""Of document masks and of published runs (tests/simulate/test_roofline.py)."""
BOUNDS = {f"matmul.{kind}.peak_tflops" for kind in ("fp32", "tf32", "fp16", "fp8", "mxfp8", "nvfp4")}
"""Bounds of the achievable rate; the one of bf16 is the reference of MFU."""
OF_A_CPU = {"attention.half_positions", "memory.functions_g_s", "memory.fresh_mib", "memory.fresh_gb_s"}


def ignored_keys() -> list[str]:
    """Return the keys whose values change no estimate of :data:`JOBS`."""
    from titan_core.api.config.resolved import Override
    from titan_core.api.plugins.assembled_job import AssembledJob
    from titan_core.loop.training import train
    from titan_simulate.estimate import estimate as module
    from titan_simulate.hardware.machine import MATMUL_TYPES, Machine
    from titan_simulate.hardware.read import read_machine

    taken: dict[Any, list[Any]] = {}
    jobs: dict[tuple[str, str], AssembledJob] = {}
    now: list[str] = []  # the job, and the type in place of that of its matmuls
    in_forks = module.forks.call_in_forks

    def once(calls: Sequence[Any], **options: Any) -> list[Any]:
        """Simulate only what was not simulated before: few figures of a machine change what runs."""
        key = now[0], str([call.args[2:5] for call in calls])
        if key not in taken:
            taken[key] = in_forks(calls, **options)
        kind = now[1]
        return [
            replace(one, trace=[replace(work, type=kind or work.type) for work in one.trace]) for one in taken[key]
        ]  # fmt: skip

    setattr(module.forks, "call_in_forks", once)  # noqa: B010 - in a process of its own
    values = read_machine("h100").model_dump()
    values["matmul"] = {kind: values["matmul"].get(kind, values["matmul"]["fp8"]) for kind in MATMUL_TYPES}
    device = Machine.model_validate(values)
    # Small matmuls take as long as their bytes, or their launch, however fast they compute: here, neither takes any time.
    memory = device.memory.model_copy(update={"bandwidth_gb_s": 1e9, "kernel_us": 0.0})
    computing = device.model_copy(update={"memory": memory, "host": device.host.model_copy(update={"operator_us": 0.0})})
    values["host"]["computes"] = True
    values["memory"] |= {"functions_g_s": 2.0, "fresh_mib": 1, "fresh_gb_s": 2.0}
    cpu = Machine.model_validate(values)

    def figures(machine: Machine, name: str, kind: str) -> dict[str, Any]:
        settings, ranks = JOBS[name]
        now[:] = name, kind

        def job_of(more: Sequence[Override]) -> AssembledJob:
            own = {**settings, **{one.key: one.text for one in more}}
            key = name, str(own)
            if key not in jobs:
                jobs[key] = make_job("llama3_debug", own, ranks, missing_ok=True)
            return jobs[key]

        try:
            found = asdict(module.estimate(job_of, train, machine))
        except UserError as error:  # "the device has no such units" is a difference, too
            return {"error": str(error)}
        return {key: value for key, value in found.items() if key not in ("device", "assumptions")}

    cases = [(device, name, "") for name in JOBS] + [(cpu, "fp32", "")]
    cases += [(computing, "eager", kind) for kind in ("fp16", "mxfp8", "nvfp4")] + [(computing, "float8", "")]
    before = [figures(*case) for case in cases]
    assert not any("error" in one for one in before), before

    def matters(key: str) -> bool:
        for change in changes(key):
            for (machine, name, kind), known in zip(cases, before, strict=True):
                if (machine is cpu) != (key in OF_A_CPU):
                    continue
                changed = change(machine)
                if changed is not None and figures(changed, name, kind) != known:
                    return True
        return False

    return [key for key in device.assumptions() if key not in ONLY_NAMES | BOUNDS | OF_FLASH and not matters(key)]


def changes(key: str) -> Iterator[Callable[[Any], Any]]:
    """Yield functions that change one figure of a machine; they return nothing where the value is impossible."""
    from pydantic import ValidationError

    def changed(machine: Any, new: Callable[[Any], Any]) -> Any:
        values = machine.model_dump()
        table = values
        *path, last = key.split(".")
        for name in path:
            table = table[name]
        table[last] = new(table[last])
        try:
            return type(machine).model_validate(values)
        except ValidationError:
            return None

    for factor in (0.5, 2.0, 1 / 4096, 64.0):

        def new(value: Any, factor: float = factor) -> Any:
            if isinstance(value, bool):
                return not value
            if isinstance(value, str):
                return "7.0"
            return type(value)(value * factor) if value else factor

        yield lambda machine, new=new: changed(machine, new)


@pytest.mark.long
def test_every_figure_of_a_machine_changes_some_estimate(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.call(ignored_keys) == []
