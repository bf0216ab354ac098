"""Measures what one device and its host compute."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.toolkit.device import attention_kernels
from titan_simulate.calibrate.result import AttentionPoint, Compute, FreshMemory, MatmulPoint, Measured
from titan_simulate.calibrate.timing import CudaTimer, HostTimer, Timer, Timing
from titan_simulate.engine.tensors import is_view
from titan_simulate.torch_private import TorchDispatchMode

CPU_MATMULS = ((1024, 1024, 1024), (2048, 256, 256), (512, 688, 256), (688, 256, 2048), (256, 256, 256), (512, 64, 64))
CUDA_MATMULS = (
    (8192, 8192, 8192), (16384, 14336, 4096), (16384, 4096, 14336), (8192, 8192, 1024), (8192, 8192, 256),
    (4096, 4096, 4096), (4096, 1024, 4096), (1024, 1024, 1024),
)  # fmt: skip
"""Rows, columns and inner dimension of matmuls: those of large models, and smaller ones to see how the rate falls."""

CPU_ATTENTION, CUDA_ATTENTION = ((4, 4, 256, 64), (1, 4, 2048, 64)), ((2, 32, 8192, 128),)
"""Batch, heads, positions and width of a head. On a CPU, short sequences are slower."""


def measure_compute(device: torch.device, timer: Timer, host_timer: HostTimer) -> Compute:
    """Return the rates of ``device`` and of the host.

    Raises:
        UserError: a clock shows no plausible time.
    """
    on_cpu = device.type == "cpu"
    return Compute(
        matmuls={name: tuple(_matmuls(device, timer, name)) for name in _types(device)},
        attention=tuple(_attention(device, timer, shape) for shape in (CPU_ATTENTION if on_cpu else CUDA_ATTENTION)),
        bandwidth=_bandwidth(device, timer, 2**20 if on_cpu else 2**28),
        mix=_pointwise_mix(device, timer),
        pointwise=_expensive_pointwise(device, timer) if on_cpu else None,
        fresh=_fresh_memory(host_timer) if on_cpu else None,
        kernel=None if on_cpu else _kernel(device, timer),
        operator=_operator(device, host_timer),
        copy=None if on_cpu else _copy(device, timer),
        host_bandwidth=_host_bandwidth(host_timer),
    )


def _types(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return ["fp32", "bf16"]
    tf32 = torch.cuda.get_device_capability(device) >= (8, 0)
    fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    return ["bf16", *(["tf32"] if tf32 else []), "fp32", *(["fp8"] if fp8 else [])]


def _matmuls(device: torch.device, timer: Timer, kind: str) -> list[MatmulPoint]:
    """Measure matmuls of random values: on GPUs, zeros would need less power and run faster."""
    points = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        for rows, columns, inner in CPU_MATMULS if device.type == "cpu" else CUDA_MATMULS:
            timings = [
                timer(_matmul(left, right, kind), f"a matmul in {kind}")
                for left, right in _layouts(rows, columns, inner, device, kind)
            ]
            seconds = statistics.mean(timing.seconds for timing in timings)
            points.append(MatmulPoint(rows, columns, inner, seconds, max(timing.spread for timing in timings)))
    finally:
        torch.set_float32_matmul_precision(before)
    return points


def _layouts(rows: int, columns: int, inner: int, device: torch.device, kind: str) -> list[tuple[Tensor, Tensor]]:
    """Return factors of a matmul as a linear layer uses them: in forward, and for the gradients of its input and its weight.
    Float8 has only the first."""
    made = partial(torch.randn, device=device)
    forward = made(rows, inner), made(columns, inner).t()
    if kind == "fp8":
        return [forward]
    return [forward, (made(rows, inner), made(inner, columns)), (made(inner, rows).t(), made(inner, columns))]


def _matmul(left: Tensor, right: Tensor, kind: str) -> Callable[[], Tensor]:
    if kind == "bf16":
        left, right = left.bfloat16(), right.bfloat16()
    elif kind == "fp8":
        from torch.nn.functional import ScalingType, scaled_mm

        one = torch.ones((), device=left.device)
        small, other = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
        tensorwise = ScalingType.TensorWise
        return partial(scaled_mm, small, other, one, tensorwise, one, tensorwise, output_dtype=torch.bfloat16)
    return partial(torch.mm, left, right)


def _attention(device: torch.device, timer: Timer, shape: tuple[int, int, int, int]) -> AttentionPoint:
    """Measure causal attention as a model of the device's size uses it."""
    batch, heads, positions, width = shape
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    made = partial(torch.randn, batch, heads, positions, width, device=device, dtype=dtype)
    query, key, value = (made().requires_grad_() for _ in range(3))
    gradient = made()
    tflop = 2 * batch * heads * positions**2 * width / 1e12

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    with attention_kernels(device):
        with torch.no_grad():
            there = timer(forward, "attention")
        result = forward()
        back = timer(
            lambda: torch.autograd.grad(result, (query, key, value), gradient, retain_graph=True),
            "the gradient of attention",
        )
    return AttentionPoint(
        positions,
        Measured(f"attention over {positions} positions, forward", tflop / there.seconds, "TFLOP/s", there.spread),
        Measured(f"attention over {positions} positions, backward", 2.5 * tflop / back.seconds, "TFLOP/s", back.spread),
    )


def _bandwidth(device: torch.device, timer: Timer, elements: int) -> Measured:
    """Measure a pointwise operator that reads two tensors and writes a third."""
    left, right = (torch.randn(elements, device=device) for _ in range(2))
    timing = timer(lambda: left + right, "a pointwise operator")
    return Measured("memory bandwidth", 3 * 4 * elements / timing.seconds / 1e9, "GB/s", timing.spread)


def _pointwise_mix(device: torch.device, timer: Timer) -> Measured:
    """Measure what a block does between its matmuls: residual sums, norms, rotary positions, copies to another layout. Many
    of these read or write tensors in strides, which a CPU does more slowly."""
    batch, positions, heads, width = (2, 256, 4, 64) if device.type == "cpu" else (4, 4096, 32, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    made = partial(torch.randn, device=device, dtype=dtype)
    hidden, other = (made(batch, positions, heads * width) for _ in range(2))
    gain, turn = made(heads * width), made(positions, 1, width // 2)
    tensor = hidden.numel() * hidden.element_size()

    def mix() -> None:
        even, odd = hidden.view(batch, positions, heads, width // 2, 2).unbind(-1)
        torch.stack((even * turn - odd * turn, even * turn + odd * turn), dim=-1)
        F.rms_norm(hidden + other, (heads * width,), gain)
        hidden.view(batch, positions, heads, width).transpose(1, 2).contiguous()

    # Each of four products, the difference and the sum moves 1 or 1.5 tensors' worth; stack, add, norm and copy the rest.
    moved = (4 * 1.0 + 2 * 1.5 + 2.0 + 3.0 + 2.0 + 2.0) * tensor
    timing = timer(mix, "pointwise operators")
    return Measured("pointwise operators of a block", moved / timing.seconds / 1e9, "GB/s", timing.spread)


def _expensive_pointwise(device: torch.device, timer: Timer) -> Measured:
    """Measure a pointwise operator that takes longer to compute than to read and write its tensors."""
    values = torch.randn(2**18, device=device)
    timing = timer(lambda: F.silu(values), "silu")
    return Measured("exponential functions", values.numel() / timing.seconds / 1e9, "G/s", timing.spread)


FRESH_MIB = (1, 2, 4, 8, 16, 32, 64, 128)


def _fresh_memory(timer: Timer) -> FreshMemory | None:
    """Measure the allocations that the system, not the process's heap, serves: it clears each page on first use."""
    seconds = {}
    for size in FRESH_MIB:
        block = partial(torch.empty, size * 2**20, dtype=torch.uint8)
        old = block()
        reused = timer(lambda old=old: old.fill_(1), "a write to memory")  # type: ignore[misc]
        fresh = timer(lambda block=block: block().fill_(1), "a write to new memory")  # type: ignore[misc]
        seconds[size] = reused, fresh
    found = [size for size, (reused, fresh) in seconds.items() if fresh.seconds > 2 * reused.seconds]
    if not found or FRESH_MIB[-1] not in found:
        return None
    reused, fresh = seconds[FRESH_MIB[-1]]
    rate = FRESH_MIB[-1] * 2**20 / (fresh.seconds - reused.seconds) / 1e9
    # The smallest size from which on all sizes are fresh.
    first = next(size for size in FRESH_MIB if all(larger in found for larger in FRESH_MIB if larger >= size))
    return FreshMemory(first, Measured("memory new from the system", rate, "GB/s", fresh.spread))


def _kernel(device: torch.device, timer: Timer) -> Measured:
    """Measure kernels that do nothing, while the host is ahead of the device."""
    assert isinstance(timer, CudaTimer)
    value = torch.zeros(32, device=device)
    timing = Timing.of((timer.spent(lambda: value.neg_(), 200) for _ in range(timer.rounds)), "a kernel")
    return Measured("smallest kernel", timing.seconds * 1e6, "µs", timing.spread)


class _Block(nn.Module):
    """A small Transformer block: the operators of training, on tensors that take almost no time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor like ``hidden``, ``[batch, positions, width]``."""
        x = self.norms[0](hidden)
        query, key, value = (one(x).unflatten(-1, (2, -1)).transpose(1, 2) for one in list(self.projections)[:3])
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)
        hidden = hidden + self.projections[3](mixed)
        x = self.norms[1](hidden)
        result: Tensor = hidden + self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class _Count(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += not is_view(operator)
        return operator(*args, **(kwargs or {}))


def _operator(device: torch.device, timer: HostTimer) -> Measured:
    """Measure the host's time for an operator of a training step: forward, backward, and what Python does in between."""
    blocks = nn.Sequential(*(_Block(16) for _ in range(4))).to(device)
    tokens = torch.randn(1, 8, 16, device=device)

    def step() -> None:
        for parameter in blocks.parameters():
            parameter.grad = None
        blocks(tokens).sum().backward()

    with attention_kernels(device):
        step()
        with _Count() as count:
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            # So few calls fit into the queue of the device that the host never waits for it.
            timing = Timing.of((_issued(step, device, timer) for _ in range(timer.rounds)), "operators")
        else:
            timing = timer(step, "operators")
    return Measured("operator, on the host", timing.seconds / count.operators * 1e6, "µs", timing.spread)


def _issued(step: Callable[[], None], device: torch.device, timer: HostTimer) -> float:
    seconds = timer.spent(step, 1)
    torch.cuda.synchronize(device)
    return seconds


def _copy(device: torch.device, timer: Timer) -> Measured:
    elements = 2**26
    host = torch.zeros(elements, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(elements, dtype=torch.uint8, device=device)
    timing = timer(lambda: there.copy_(host, non_blocking=True), "a copy to the device")
    return Measured("copy between host and device", elements / timing.seconds / 1e9, "GB/s", timing.spread)


def _host_bandwidth(timer: HostTimer) -> Measured:
    """Measure the fused optimizer on the host, with more state than a cache holds."""
    parameter = nn.Parameter(torch.zeros(2**22))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    timing = timer(optimizer.step, "an optimizer step on the host")
    moved = 7 * 4 * parameter.numel()  # reads parameter, gradient and two moments; writes parameter and moments
    return Measured("optimizer on the host", moved / timing.seconds / 1e9, "GB/s", timing.spread)


def memory_of(device: torch.device) -> float:
    """Return the memory of the device in GiB; on a CPU, that of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
