"""A decoder with experts for the arithmetic of plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from titan_core.api import (
    Column,
    Experts,
    MeshPlan,
    MeshView,
    ModelDefinition,
    ModelLayout,
    Replicate,
    Router,
    Row,
    causal_attention,
)
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_simulate.hardware.read import read_machine
from titan_simulate.plan.arithmetic import Arithmetic
from titan_simulate.plan.model_sizes import ModelSizes, sizes_of
from titan_simulate.plan.workload import Guess, Workload

DIM, HIDDEN, VOCABULARY, BLOCKS, EXPERTS, CHOSEN = 1024, 4096, 32_000, 8, 8, 2
VIEW = MeshView("ep", "x.ep", ("dp_shard", "cp"))


def decoder_sizes(
    tied: bool = False, exact: tuple[str, ...] = (), routers: Mapping[str, Router] | None = None
) -> ModelSizes:
    """Return the sizes of a decoder whose blocks have attention with fewer key heads, and experts."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCABULARY, DIM), "norm.weight": (DIM,), "out.weight": (VOCABULARY, DIM)
    }  # fmt: skip
    modules = ["embed", "norm", "out"]
    for index in range(BLOCKS):
        block = f"blocks.{index}"
        modules += [block, f"{block}.attention", f"{block}.attention.mixer"]
        shapes |= {
            f"{block}.attention.q.weight": (DIM, DIM),
            f"{block}.attention.o.weight": (DIM, DIM),
            f"{block}.norm.weight": (DIM,),
            f"{block}.experts.up": (EXPERTS, DIM, HIDDEN),
            f"{block}.experts.down": (EXPERTS, HIDDEN, DIM),
        }
    layout = ModelLayout(
        num_blocks=BLOCKS, dim=DIM, vocab_size=VOCABULARY, max_seq_len=8192,
        embedding=("embed",), blocks="blocks", head=("norm", "out"),
        rules={
            "*.q.weight": Column(), "*.o.weight": Row(), "*norm.weight": Replicate(), "*.experts.*": Experts(),
        },
        regions=("blocks.*.attention",),
        mixers={"blocks.*.attention.mixer": causal_attention(16, 4)},
        tied={"out.weight": "embed.weight"} if tied else {}, exact=exact, routers=routers or {},
    )  # fmt: skip
    if tied:
        del shapes["out.weight"]
    active = BLOCKS * (2 * DIM**2 + DIM + CHOSEN * 2 * DIM * HIDDEN) + DIM + VOCABULARY * DIM
    definition = ModelDefinition(
        layout=layout, build=lambda: None, num_params=1, flops_per_token=lambda seq_len: 6.0 * active + 12.0 * seq_len
    )
    return sizes_of(definition, shapes, modules, 8192)


SIZES = decoder_sizes()


def mesh_of(ep: int = 1, **degrees: int) -> MeshPlan:
    """Return a mesh of Titan's dimensions; experts are divided over ``ep`` ranks of a view."""
    return MeshPlan(STANDARD_DIMS, {dim.name: degrees.get(dim.name, 1) for dim in STANDARD_DIMS}, (VIEW,), {"ep": ep})


def workload(mesh: MeshPlan, **changes: object) -> Workload:
    """Return a job of 4 microbatches of a sequence of 8192."""
    job = Workload(mesh, 8192, 1, 4, parameter_bytes=2, matmul_type="bf16", wide_type="bf16")
    return replace(job, **changes)  # type: ignore[arg-type]


def guess_of(mesh: MeshPlan, **changes: object) -> Guess:
    """Return the guess for the decoder on H100s."""
    return Arithmetic(SIZES, read_machine("h100")).guess(workload(mesh, **changes))
