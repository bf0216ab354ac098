"""Time of operators, of streams and of pipelines, against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

pytest.importorskip("titan_simulate")

from titan_simulate.estimate.fusion import fuse
from titan_simulate.estimate.pipeline import Action, Order, gpipe, one_forward_one_backward, run
from titan_simulate.estimate.roofline import (
    collective_seconds,
    link_shares,
    matmul_seconds,
    moving_seconds,
    seconds_of,
    send_seconds,
)
from titan_simulate.estimate.tensor_overlap import overlap_tensor_parallel
from titan_simulate.estimate.timeline import simulate_streams
from titan_simulate.estimate.work import Data, Kind, Work
from titan_simulate.hardware.read import read_machine

H100 = read_machine("h100")
FREE = H100.model_copy(update={"host": H100.host.model_copy(update={"operator_us": 0.0, "compiled_kernel_us": 0.0})})
"""An H100 whose host takes no time."""


def matmul(rows: int, inner: int, columns: int, kind: str = "bf16") -> Work:
    size = 2 * rows * inner * columns
    return Work(
        Kind.MATMUL, "aten::mm", "forward", "layers.0", "main", (), flops=size, type=kind, sizes=(1, rows, inner, columns)
    )


def pointwise(reads: list[int], writes: list[int], size: int = 2**26, compiled: bool = False) -> Work:
    return Work(
        Kind.POINTWISE, "aten::mul", "forward", "layers.0", "main", (), tuple(Data(one, size) for one in reads),
        tuple(Data(one, size) for one in writes), compiled=compiled,
    )  # fmt: skip


def test_a_large_matmul_runs_near_its_rate_and_a_small_one_does_not() -> None:
    large, small = matmul(16384, 8192, 8448), matmul(128, 8192, 256)
    rate = H100.matmul["bf16"].achievable_tflops * 1e12
    assert large.flops / matmul_seconds(large, H100) > 0.93 * rate
    assert small.flops / matmul_seconds(small, H100) < 0.05 * rate


def test_a_tile_too_many_costs_a_whole_wave() -> None:
    full = matmul(128 * 12, 8192, 256 * 11)  # 132 tiles
    more = matmul(128 * 12 + 1, 8192, 256 * 11)
    assert matmul_seconds(more, H100) > 1.2 * matmul_seconds(full, H100)


def test_float8_is_faster_than_bf16_and_fp32_slower() -> None:
    times = [matmul_seconds(matmul(8192, 8192, 8192, kind), H100) for kind in ("fp8", "bf16", "tf32", "fp32")]
    assert times == sorted(times)


def test_a_gather_over_nvlink_takes_bytes_over_bus_bandwidth() -> None:
    size = 8 * 2**30
    expected = size * 7 / 8 / (H100.links.node.bandwidth_gb_s * 1e9)
    assert collective_seconds("all_gather", size, range(8), H100) == pytest.approx(expected, rel=0.01)
    assert collective_seconds("allreduce_", size, range(8), H100) == pytest.approx(2 * expected, rel=0.01)


def test_the_ranks_of_a_group_decide_which_link_limits_it() -> None:
    size = 8 * 2**30
    inside = collective_seconds("all_gather", size, range(8), H100)
    whole_nodes = collective_seconds("all_gather", size, range(64), H100)  # 8 network cards per node
    one_per_node = collective_seconds("all_gather", size, range(0, 64, 8), H100)
    assert inside < whole_nodes < 1.5 * inside
    assert one_per_node == pytest.approx(size * 7 / 8 / (H100.links.network.bandwidth_gb_s * 1e9), rel=0.01)


def test_a_small_reduction_over_many_ranks_runs_as_a_tree() -> None:
    few, many = (collective_seconds("allreduce_", 4, range(count), H100) for count in (64, 4096))
    assert many < 4 * few


def test_a_group_of_one_rank_communicates_nothing() -> None:
    assert collective_seconds("all_gather", 2**30, [3], H100) == 0.0


def test_streams_overlap_and_waits_order_them() -> None:
    gather = Work(Kind.COLLECTIVE, "all_gather", "forward", "", "gather", (), ranks=tuple(range(8)), bytes=2**30)
    apart = simulate_streams([gather, pointwise([1], [2])], FREE)
    one = seconds_of(gather, FREE)
    assert apart.seconds < one + 0.5 * seconds_of(pointwise([1], [2]), FREE)
    waiting = simulate_streams([gather, replace(pointwise([1], [2]), after=(0,))], FREE)
    assert waiting.seconds == pytest.approx(one + seconds_of(pointwise([1], [2]), FREE))
    assert waiting.exposed[0] == pytest.approx(one)
    assert apart.exposed[0] < waiting.exposed[0]


def test_the_host_issues_nothing_while_it_reads_from_the_device() -> None:
    reads = Work(Kind.HOST_WAIT, "the host waits", "forward", "", "main", ())
    long, short = matmul(8192, 8192, 8192), pointwise([1], [2])
    machine = H100.model_copy(update={"host": H100.host.model_copy(update={"operator_us": 50.0})})
    ahead = simulate_streams([long, *[short] * 4], machine)
    assert ahead.intervals[-1].start == pytest.approx(ahead.intervals[-2].end)  # issued long before
    waits = simulate_streams([long, reads, *[short] * 4], machine)
    end = waits.intervals[1].end
    assert end >= waits.intervals[0].end and waits.intervals[2].start == pytest.approx(end + 50e-6)
    twice = simulate_streams([long, reads, short, reads, short], machine)
    assert twice.intervals[3].start >= twice.intervals[2].end
    assert twice.intervals[4].start == pytest.approx(twice.intervals[3].end + 50e-6)
    elsewhere = simulate_streams([long, reads, replace(short, stream="another")], machine)
    assert elsewhere.intervals[2].start == pytest.approx(elsewhere.intervals[1].end + 50e-6)  # though it needs nothing


def collective(name: str, ranks: Iterable[int], group: str, stream: str, size: int = 2**30) -> Work:
    return Work(Kind.COLLECTIVE, name, "backward", "", stream, (), ranks=tuple(ranks), group=group, bytes=size)


NODE, NETWORK = range(8), range(0, 64, 8)


@pytest.mark.parametrize("ranks", [NODE, NETWORK], ids=["node", "network"])
def test_a_communicator_runs_one_collective_at_a_time_whatever_their_streams(ranks: range) -> None:
    gather, reduce = (collective(name, ranks, "fsdp", name) for name in ("all_gather", "reduce_scatter"))
    alone = seconds_of(gather, FREE)
    (first, second) = simulate_streams([gather, reduce], FREE).intervals
    assert (first.end, second.start, second.end) == pytest.approx((alone, alone, 2 * alone))


def test_groups_share_the_links_that_they_have_in_common() -> None:
    gather = collective("all_gather", NODE, "fsdp", "1")
    alone = seconds_of(gather, FREE)
    other = collective("all_gather", range(2), "tp", "2", size=2**30)
    both = simulate_streams([gather, other], FREE).intervals
    assert [one.start for one in both] == [0.0, 0.0]
    short = seconds_of(other, FREE)
    assert [one.end for one in both] == pytest.approx([alone + short, 2 * short])
    elsewhere = collective("all_gather", NETWORK, "hsdp", "2")
    apart = simulate_streams([gather, elsewhere], FREE).intervals
    assert [one.end for one in apart] == pytest.approx([alone, seconds_of(elsewhere, FREE)])


def test_a_ring_over_nodes_takes_from_both_links_and_an_exchange_what_it_sends() -> None:
    ring, inside = collective("all_gather", range(64), "dp", "1"), collective("all_gather", range(8), "tp", "2")
    share = link_shares(ring, H100)
    assert share == pytest.approx({"node": 1.0, "network, out": 1.0, "network, in": 1.0})  # 8 cards are as fast as NVLink
    assert simulate_streams([ring, inside], FREE).intervals[1].end == pytest.approx(2 * seconds_of(inside, FREE))
    exchange = link_shares(collective("alltoall_base_", range(16), "ep", "1"), H100)
    assert exchange == pytest.approx({"node": 7 / 360 / (8 / 45), "network, out": 1.0, "network, in": 1.0})


def test_passing_a_tensor_on_takes_as_long_as_a_send_over_the_slowest_hop() -> None:
    size = 2**30
    passes = replace(collective("c10d::alltoall_base_", range(2), "cp", "1"), permutes=True)
    assert seconds_of(passes, H100) == pytest.approx(send_seconds(size, H100, same_node=True))
    assert seconds_of(replace(passes, permutes=False), H100) < 0.6 * seconds_of(passes, H100)
    across = replace(passes, ranks=tuple(range(6, 10)))
    assert seconds_of(across, H100) == pytest.approx(send_seconds(size, H100))
    assert link_shares(across, H100) == pytest.approx({"node": 45 / 360, "network, out": 1.0, "network, in": 1.0})


def test_a_send_and_a_receive_do_not_share_a_direction() -> None:
    send = Work(Kind.SEND, "c10d::send", "forward", "", "1", (), ranks=(8,), bytes=2**28)
    receive = replace(send, kind=Kind.RECEIVE, name="c10d::recv_", stream="2")
    alone = seconds_of(send, FREE)
    assert simulate_streams([send, receive], FREE).seconds == pytest.approx(alone)
    assert simulate_streams([send, replace(send, stream="2")], FREE).seconds == pytest.approx(2 * alone)


def test_communication_slows_computation_by_the_multiprocessors_that_it_takes() -> None:
    gather = Work(Kind.COLLECTIVE, "all_gather", "forward", "", "gather", (), ranks=tuple(range(8)), bytes=2**34)
    alone = simulate_streams([matmul(8192, 8192, 8192)], FREE).seconds
    both = simulate_streams([gather, matmul(8192, 8192, 8192)], FREE).intervals[1]
    share = 1 - H100.links.multiprocessors / H100.multiprocessors
    assert both.end - both.start == pytest.approx(alone / share)


def test_the_host_is_a_lower_bound() -> None:
    tiny = [pointwise([1], [2], size=4) for _ in range(1000)]
    slow = H100.model_copy(update={"host": H100.host.model_copy(update={"operator_us": 50.0})})
    assert simulate_streams(tiny, slow).seconds >= 0.05
    assert simulate_streams(tiny, FREE).seconds == pytest.approx(1000 * H100.memory.kernel_us * 1e-6)


def test_compiled_code_issues_all_of_its_kernels_faster() -> None:
    one = pointwise([1], [2], compiled=True)
    kinds = [one, replace(one, name="fused"), replace(matmul(8, 8, 8), compiled=True)]
    kinds.append(replace(kinds[-1], kind=Kind.ATTENTION))
    for work in kinds:
        assert simulate_streams([work], H100).host == pytest.approx(H100.host.compiled_kernel_us * 1e-6)
        assert simulate_streams([replace(work, compiled=False)], H100).host == pytest.approx(H100.host.operator_us * 1e-6)


def test_fused_operators_read_inputs_once_and_never_write_what_only_they_use() -> None:
    size = 2**26
    chain = [pointwise([1], [2], compiled=True), pointwise([1, 2], [3], compiled=True), pointwise([3], [4], compiled=True)]
    (fused, _) = fuse([*chain, replace(matmul(8, 8, 8), reads=(Data(4, size),))])
    assert (fused.reads, fused.writes) == ((Data(1, size),), (Data(4, size),))
    assert seconds_of(fused, H100) == pytest.approx(moving_seconds(2 * size, H100))
    eager = [replace(work, compiled=False) for work in chain]
    assert fuse(eager) == eager


def test_fusion_keeps_what_backward_reads_and_stops_at_a_matmul() -> None:
    size = 2**26
    product = replace(matmul(8, 8, 8), reads=(Data(2, size),), writes=(Data(5, size),))
    saved = replace(pointwise([2], [9]), phase="backward")
    trace = [pointwise([1], [2], compiled=True), product, pointwise([5], [6], compiled=True), saved]
    fused = fuse(trace)
    assert len(fused) == 4
    assert fused[0].writes == (Data(2, size),)


def test_a_kernel_ends_where_another_stream_waits_for_it() -> None:
    gather = Work(Kind.COLLECTIVE, "all_gather", "forward", "", "tp", (0,), ranks=tuple(range(8)), bytes=2**28)
    trace = [
        pointwise([1], [2], compiled=True),
        gather,
        replace(pointwise([2], [3], compiled=True)),
        replace(pointwise([3], [4], compiled=True), after=(1,)),
    ]
    fused = fuse(trace)
    assert [work.after for work in fused] == [(), (0,), (1,)]
    assert simulate_streams(fused, FREE).seconds > seconds_of(gather, FREE)


def test_asynchronous_tensor_parallelism_hides_a_gather_behind_its_matmul() -> None:
    gather = Work(
        Kind.COLLECTIVE,
        "_c10d_functional::all_gather_into_tensor",
        "forward",
        "",
        "tp",
        (),
        ranks=tuple(range(8)),
        bytes=2**28,
    )
    work = [gather, replace(matmul(16384, 8192, 8192), after=(0,))]
    before, after = (simulate_streams(trace, FREE).seconds for trace in (work, overlap_tensor_parallel(work, FREE)))
    assert overlap_tensor_parallel(work, FREE)[0].bytes == gather.bytes  # it still moves all of them
    least = seconds_of(work[1], FREE)
    assert least < after < least + 0.25 * (before - least)


def test_gathers_of_one_matmul_share_its_time_and_those_on_another_stream_are_left_alone() -> None:
    gather = Work(
        Kind.COLLECTIVE, "c10d::_allgather_base_", "forward", "", "main", (), ranks=tuple(range(8)), bytes=2**28
    )  # fmt: skip
    small = matmul(1024, 1024, 1024)
    two, one = ([*gathers, small] for gathers in ([gather, gather], [gather]))
    hidden = [sum(work.hidden_seconds for work in overlap_tensor_parallel(trace, FREE)) for trace in (two, one)]
    assert hidden == pytest.approx([seconds_of(small, FREE) * 7 / 8] * 2)
    apart = replace(gather, stream="fsdp")
    assert overlap_tensor_parallel([apart, small], FREE)[0] == apart


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (8, 32)])
def test_the_bubble_of_simple_schedules_is_the_textbook_one(schedule: str, ranks: int, microbatches: int) -> None:
    actions: list[list[Action]] = [
        gpipe(rank, microbatches) if schedule == "gpipe" else one_forward_one_backward(rank, ranks, microbatches)
        for rank in range(ranks)
    ]
    order = Order(tuple(map(tuple, actions)), tuple(range(ranks)))
    found = run(order, {"F": [1.0] * ranks, "B": [2.0] * ranks}, send=0.0)
    assert found.seconds == pytest.approx(3.0 * (microbatches + ranks - 1))
    assert found.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_a_slow_stage_holds_the_others_up() -> None:
    order = Order(tuple(tuple(one_forward_one_backward(rank, 4, 16)) for rank in range(4)), (0, 1, 2, 3))
    even = run(order, {"F": [1.0] * 4, "B": [2.0] * 4}, send=0.0).seconds
    uneven = run(order, {"F": [1.0, 1.0, 1.0, 2.0], "B": [2.0, 2.0, 2.0, 4.0]}, send=0.0).seconds
    assert uneven > 1.7 * even


def attention(name: str, flops: int, causal: bool = False) -> Work:
    return Work(Kind.ATTENTION, f"aten::{name}", "forward", "layers.0", "main", (), flops=flops, causal=causal)


def test_attention_runs_at_the_rate_of_the_kernel_of_its_pass() -> None:
    """cuDNN on Hopper; FlexAttention, which computes document masks, as fast as FlashAttention 2."""
    tera = 10**12
    sdpa, flex = "_scaled_dot_product_flash_attention", "flex_attention"
    assert seconds_of(attention(sdpa, 600 * tera // 1000), H100) == pytest.approx(1e-3)
    assert seconds_of(attention(f"{sdpa}_backward", 518 * tera // 1000), H100) == pytest.approx(1e-3)
    assert seconds_of(attention(sdpa, 528 * tera // 1000, causal=True), H100) == pytest.approx(1e-3)
    assert seconds_of(attention(flex, 333 * tera // 1000, causal=True), H100) == pytest.approx(1e-3)
    assert seconds_of(attention(f"{flex}_backward", 318 * tera // 1000), H100) == pytest.approx(1e-3)
    a100 = read_machine("a100")  # has one kernel for both
    assert seconds_of(attention(flex, 190 * tera // 1000), a100) == pytest.approx(1e-3)


def test_the_host_launches_a_graph_at_once() -> None:
    small = matmul(16, 16, 16)
    launched, graphed = ([replace(small, graphed=one)] * 100 for one in (False, True))
    assert simulate_streams(launched, H100).seconds > 100e-6 * H100.host.operator_us
    assert simulate_streams(graphed, H100).seconds == pytest.approx(100 * seconds_of(small, H100))
    assert simulate_streams(graphed, H100).host == 0.0
