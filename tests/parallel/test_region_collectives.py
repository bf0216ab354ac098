"""What a rank of tensor parallelism calls: the collectives of each block, and no operators on DTensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness.fake_ranks import Operators, build_on_fake_ranks, fake_ranks
from harness.objectives import first_step
from titan_core.api import Batch, ModelPart
from titan_parallel import region_collectives
from titan_parallel.partial_gradients import observe
from titan_parallel.slots import PARTIAL_GRADIENTS

SIZES = "{{dim = 32, n_layers = {}, n_heads = 4, n_kv_heads = 2, ffn_dim = 64}}"
SEQ = 16
SMALL: dict[str, object] = {"training.seq_len": SEQ, "training.local_batch_size": 2, "parallelism.tensor_parallel_degree": 2}
NO_SP = {"parallelism.disable_sequence_parallel": "true"}
NO_LOSS = {"parallelism.disable_loss_parallel": "true"}


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_ranks(2):
        yield


def part_of(overrides: dict[str, object], layers: int = 1) -> ModelPart:
    return build_on_fake_ranks({**SMALL, "model.args": SIZES.format(layers), **overrides})[0]


def loss_of(part: ModelPart) -> Tensor:
    tokens = torch.zeros(2, SEQ, dtype=torch.int64)
    return part.forward_loss(first_step(Batch(tokens, tokens)))


def passes(overrides: dict[str, object], layers: int) -> tuple[Operators, Operators]:
    """Return what a model calls in forward and in backward."""
    part = part_of(overrides, layers)
    with Operators() as forward:
        loss = loss_of(part)
    with Operators() as backward:
        loss.backward()
    return forward, backward


KEPT: dict[str, object] = {"parallelism.tensor_parallel_reshard_after_forward": "never"}
GATHERED = Counter({"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2})
SUMMED = Counter({"all_reduce": 2})


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (KEPT, (GATHERED, GATHERED)),
        ({}, (GATHERED, GATHERED + Counter({"all_gather_into_tensor": 2}))),
        (NO_SP, (SUMMED, SUMMED)),
    ],
    ids=["sequence parallel, inputs kept", "sequence parallel", "replicated"],
)
def test_a_block_calls_the_collectives_of_theory(
    overrides: dict[str, object], expected: tuple[Counter[str], Counter[str]]
) -> None:
    """Attention and feed-forward each gather their input and sum their output, in forward and, conversely, in backward,
    which also gathers the inputs again."""
    one, two = passes(overrides, 1), passes(overrides, 2)
    assert tuple(deep.collectives - shallow.collectives for shallow, deep in zip(one, two, strict=True)) == expected


def test_large_sequences_are_gathered_and_scattered_without_a_copy_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = passes(KEPT, 1), passes(KEPT, 2)
    monkeypatch.setattr(region_collectives, "LARGE_ROW", 0)
    by_row = passes(KEPT, 1), passes(KEPT, 2)
    for number in range(2):  # forward and backward
        copies = (two[number].others - one[number].others)["cat"]
        shallow, deep = by_row[0][number], by_row[1][number]
        assert (deep.others - shallow.others)["cat"] == copies - 4
        assert deep.collectives - shallow.collectives == Counter({"_allgather_base_": 4, "reduce_scatter_tensor": 4})


TIED = {"model.args.tie_embeddings": "true"}


@pytest.mark.parametrize("overrides", [{}, NO_SP, NO_LOSS, TIED, {"activation_checkpoint.mode": "selective"}], ids=str)
def test_no_operator_runs_on_dtensors(overrides: dict[str, object]) -> None:
    forward, backward = passes(overrides, 2)
    assert not forward.on_dtensors
    assert not backward.on_dtensors


def test_the_gradients_of_all_replicated_parameters_are_summed_by_one_collective() -> None:
    part, mesh, _ = build_on_fake_ranks({**SMALL, "model.args": SIZES.format(2)})
    loss_of(part).backward()
    replicated = {
        name: parameter for name, parameter in part.module.named_parameters() if parameter.placements[0].is_replicate()
    }
    assert {f"{module}.{leaf}" for module, leaves in part.entries(PARTIAL_GRADIENTS).items() for leaf in leaves} == {
        *replicated
    }
    context: Any = SimpleNamespace(mesh=mesh, device=torch.device("cpu"))
    observer: Any = observe([part], context)
    with Operators() as operators:
        observer.titan_gradients_complete(1)
    assert operators.collectives == {"allreduce_": 1}
    assert not operators.on_dtensors


def test_gradients_of_parameters_that_a_view_has_divided_among_the_ranks_are_not_summed() -> None:
    """Such as those of experts, which are complete over the ranks of the view."""
    part, mesh, _ = build_on_fake_ranks({**SMALL, "model.args": SIZES.format(1)})
    view = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    for name, leaves in part.entries(PARTIAL_GRADIENTS).items():
        for leaf in leaves:
            divided = nn.Parameter(distribute_tensor(torch.zeros(32), view, [Shard(0)]))
            divided.grad = divided.detach().clone()
            part.module.get_submodule(name).register_parameter(leaf, divided)
    context: Any = SimpleNamespace(mesh=mesh, device=torch.device("cpu"))
    observer: Any = observe([part], context)
    with Operators() as operators:
        observer.titan_gradients_complete(1)
    assert not operators.collectives


def test_without_sequence_parallelism_norms_between_regions_need_no_sum() -> None:
    assert not part_of(NO_SP).entries(PARTIAL_GRADIENTS)


def test_positions_that_do_not_divide_are_an_error() -> None:
    part, tokens = part_of({}), torch.zeros(2, 15, dtype=torch.int64)
    with pytest.raises(ValueError, match="15 positions cannot be divided over 2 ranks"):
        part.forward_loss(first_step(Batch(tokens, tokens)))


@pytest.mark.full
def test_the_compiler_overlaps_the_collectives_with_matmuls() -> None:
    """Asynchronous tensor parallelism: inductor fuses every all-gather with the matmuls that read it, and, in forward, every
    reduce-scatter with the matmul before it. In backward, a reduce-scatter follows a sum of matmuls, which it does not fuse.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape
    from torch.distributed._symmetric_memory import _test_mode

    part = part_of({})
    (block,) = part.blocks().values()
    graphs: list[Any] = []

    def keep(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table())
    hidden = torch.randn(2, SEQ // 2, 32, requires_grad=True)
    angles: Any = part.module.angles
    torch.compile(block, backend=backend, fullgraph=True)(hidden, angles[:SEQ], None).sum().backward()
    found = []
    for graph in graphs:
        view_to_reshape(graph)
        remove_noop_ops(graph.graph)
        with _test_mode():
            micro_pipeline_tp_pass(graph.graph)
        names = Counter(node.target.__name__.partition(".")[0] for node in graph.graph.nodes if node.op == "call_function")
        found.append([names[name] for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter", *GATHERED)])
    assert found == [[2, 2, 0, 0], [2, 0, 0, 2]]
