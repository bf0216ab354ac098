"""A machine of round figures, and a model of one kind of block with one matrix, so that each term is computed by hand."""

from __future__ import annotations

from dataclasses import replace

from titan_core.api import Column, MeshPlan, causal_attention
from titan_simulate.hardware.machine import Allocator, Attention, Host, Link, Links, Machine, Matmul, MemoryRates
from titan_simulate.hardware.read import read_machine
from titan_simulate.plan.arithmetic import Arithmetic
from titan_simulate.plan.model_sizes import Matrix, ModelSizes, Unit
from titan_simulate.plan.workload import Guess, Workload

TEN = read_machine("h100").model_copy(
    update={
        "memory_gib": 100.0,
        "context_gib": 0.0,
        "ranks_per_node": 4,
        "matmul": {
            kind: Matmul(peak_tflops=2.0 * rate, achievable_tflops=rate, half_depth=0.0)
            for kind, rate in (("bf16", 10.0), ("fp32", 1.0))
        },
        "attention": Attention(forward_tflops=4.0, backward_tflops=5.0, causal=0.5),
        "memory": MemoryRates(bandwidth_gb_s=1000.0, efficiency=0.5),
        "host": Host(operator_us=0.0, compiled_kernel_us=0.0, optimizer_gb_s=20.0),
        "links": Links(
            start_us=0.0,
            node=Link(bandwidth_gb_s=100.0, latency_us=0.0),
            network=Link(bandwidth_gb_s=10.0, latency_us=0.0),
        ),
        "allocator": Allocator(caching=False),
    }
)
WIDTH, UP, WORDS, LAYERS, LENGTH = 1000, 4000, 50_000, 4, 1000
KEYS = 500  # 2 x WIDTH, a fourth of the heads
TABLE = WORDS * WIDTH


def _plain() -> ModelSizes:
    unit = Unit(
        divided=WIDTH * UP, matrices=[Matrix(WIDTH, UP, Column())], weights=[(UP, WIDTH, 1)],
        regions=1, shared=WIDTH, split=UP + 4 * WIDTH,
        mixers=[causal_attention(4, 1)],
    )  # fmt: skip
    blocks = {f"blocks.{index}": replace(unit) for index in range(LAYERS)}
    outer = {
        name: Unit(divided=TABLE, matrices=[Matrix(WIDTH, WORDS, None)] if name == "out" else [])
        for name in ("embed", "out")
    }
    units = {"embed": outer["embed"], **blocks, "out": outer["out"]}
    flops = 6.0 * (LAYERS * WIDTH * UP + TABLE)
    return ModelSizes(units, WIDTH, WORDS, tuple(blocks), (), flops, mixer_flops=6e6)


PLAIN = _plain()


def with_links(node: float, network: float, ranks_per_node: int = 4) -> Machine:
    """Return the machine with other bandwidths, in GB/s."""
    node_link, network_link = (Link(bandwidth_gb_s=one, latency_us=0.0) for one in (node, network))
    links = Links(start_us=0.0, node=node_link, network=network_link)
    return TEN.model_copy(update={"links": links, "ranks_per_node": ranks_per_node})


def by_hand(mesh: MeshPlan, microbatches: int = 1, machine: Machine = TEN, **changes: object) -> Guess:
    """Return the guess for the model, of microbatches of one sequence."""
    job = Workload(mesh, LENGTH, 1, microbatches, parameter_bytes=2, reduce_bytes=4, matmul_type="bf16", wide_type="bf16")
    return Arithmetic(PLAIN, machine).guess(replace(job, **changes))  # type: ignore[arg-type]


BLOCK_MATMULS = 3 * 2 * LENGTH * WIDTH * UP / 10e12  # forward, and twice in backward
HEAD_MATMULS = 6 * LENGTH * TABLE / 10e12
ATTENTION = 6e6 / 6 * LENGTH * (1 / (4e12 * 0.5) + 2.5 / (5e12 * 0.5))
POINTWISE = 8 * LENGTH * (UP + 5 * WIDTH) * LAYERS * 2 / 500e9  # eight passes over activations of two bytes
COMPUTE = LAYERS * BLOCK_MATMULS + HEAD_MATMULS + ATTENTION + POINTWISE
