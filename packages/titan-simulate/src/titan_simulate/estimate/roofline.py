"""Roofline time of an operator on a machine. Free of torch. docs/estimate.md has the equations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from titan_simulate.engine.names import is_varlen
from titan_simulate.estimate.work import Kind, Work
from titan_simulate.hardware.machine import AttentionRates, Link, Machine


def seconds_of(work: Work, machine: Machine) -> float:
    """Return the duration of ``work`` when nothing else runs."""
    return work.times * _seconds_once(work, machine)


def _seconds_once(work: Work, machine: Machine) -> float:
    floor = work.launches * machine.memory.kernel_us * 1e-6
    match work.kind:
        case Kind.WAIT:
            return 0.0
        case Kind.MATMUL:
            return max(matmul_seconds(work, machine), moving_seconds(work.traffic, machine), floor)
        case Kind.ATTENTION:
            rates: AttentionRates = machine.attention
            if ("flex" in work.name or is_varlen(work.name)) and machine.attention.flash is not None:
                rates = machine.attention.flash
            rate = rates.backward_tflops if "backward" in work.name else rates.forward_tflops
            rate *= rates.causal if work.causal else 1.0
            return max(work.flops / (rate * 1e12), moving_seconds(work.traffic, machine), floor)
        case Kind.COLLECTIVE if work.permutes:
            return send_seconds(work.bytes, machine, same_node=_in_one_node(work.ranks, machine))
        case Kind.COLLECTIVE:
            return collective_seconds(work.name, work.bytes, work.ranks, machine)
        case Kind.SEND | Kind.RECEIVE:
            return send_seconds(work.bytes, machine)
        case Kind.HOST_COPY:
            size = max((one.bytes for one in (*work.reads, *work.writes)), default=0)
            return size / (machine.host.copy_gb_s * 1e9) + floor
        case Kind.HOST:
            return work.traffic / (machine.host.optimizer_gb_s * 1e9)
        case _:
            return max(moving_seconds(work.traffic, machine), floor)


def moving_seconds(size: int, machine: Machine) -> float:
    """Return the time to read and write ``size`` bytes of the device's memory."""
    return size / (machine.memory.bandwidth_gb_s * 1e9 * machine.memory.efficiency)


def matmul_seconds(work: Work, machine: Machine) -> float:
    """Return the time of a matmul.

    Multiprocessors compute whole tiles of the result, all at once, in waves. The last wave takes as long as the others. Each
    tile needs some time to fill and drain its pipeline, whatever the inner dimension.
    """
    rates = machine.matmul_of(work.type)
    batch, rows, inner, columns = work.sizes
    if min(work.sizes) < 1 or not work.flops:
        return 0.0
    best = math.inf
    for shrink, efficiency in ((1, 1.0), (2, rates.half_tile), (4, rates.quarter_tile)):  # libraries choose among tiles
        tile = rates.tile_rows, max(1, rates.tile_columns // shrink)
        tiles = batch * math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
        waves = math.ceil(tiles / machine.multiprocessors)
        computed = waves * machine.multiprocessors * tile[0] * tile[1]
        best = min(best, computed / efficiency)
    wasted = max(1.0, best / (batch * rows * columns))
    depth = 1.0 + rates.half_depth / inner
    return work.flops * wasted * depth / (rates.achievable_tflops * 1e12)


def collective_seconds(name: str, size: int, ranks: Sequence[int], machine: Machine) -> float:
    """Return the time of a collective on ``size`` bytes, the larger of input and output, by ring or, if faster, by tree."""
    count = len(ranks)
    if count < 2:
        return 0.0
    hops, link, per_node = _path(ranks, machine)
    start = machine.links.start_us * 1e-6
    rate = link.bandwidth_gb_s * 1e9
    if _is_exchange(name):
        away = (count - per_node) / count
        near = (per_node - 1) / count * size / (machine.links.node.bandwidth_gb_s * 1e9)
        far = away * size / (machine.links.network.bandwidth_gb_s * 1e9)
        return start + max(near, far) + (machine.links.network if away else machine.links.node).latency_us * 1e-6
    if "broadcast" in name or ("scatter_" in name and "reduce_scatter" not in name):
        return start + hops / max(1, count - 1) * math.log2(count) + size / rate
    ring = hops + size * (count - 1) / count / rate
    if "allreduce" in name or "all_reduce" in name:
        tree = 2 * math.ceil(math.log2(count)) * hops / max(1, count - 1) + 2 * size / rate
        return start + min(2 * ring, tree)
    return start + ring


def _path(ranks: Sequence[int], machine: Machine) -> tuple[float, Link, int]:
    """Return the latency of a ring over ``ranks``, the link that limits its bandwidth, and the most ranks in a node.

    A ring enters and leaves each node once per rank there, over that rank's network card, so rings use the cards of all
    ranks that the group has in a node.
    """
    number, least, per_node = _nodes(tuple(ranks), machine.ranks_per_node)
    node, network = machine.links.node, machine.links.network
    if number == 1:
        return (len(ranks) - 1) * node.latency_us * 1e-6, node, per_node
    hops = (len(ranks) - number) * node.latency_us + number * network.latency_us
    bandwidth = least * network.bandwidth_gb_s
    if per_node > 1:
        bandwidth = min(bandwidth, node.bandwidth_gb_s)
    return hops * 1e-6, Link(bandwidth_gb_s=bandwidth, latency_us=network.latency_us), per_node


@lru_cache(maxsize=4096)
def _nodes(ranks: tuple[int, ...], per_node: int) -> tuple[int, int, int]:
    """Return the number of nodes that have some of ``ranks``, and the fewest and the most that one has."""
    nodes = Counter(rank // per_node for rank in ranks)
    return len(nodes), min(nodes.values()), max(nodes.values())


def link_shares(work: Work, machine: Machine) -> dict[str, float]:
    """Return the share of each link's bandwidth that communication uses while it has the links for itself.

    Links carry as much in one direction as in the other: a collective uses both, a send or a receive one.
    """
    match work.kind:
        case Kind.SEND:
            return {"network, out": 1.0}
        case Kind.RECEIVE:
            return {"network, in": 1.0}
        case Kind.COLLECTIVE if len(work.ranks) > 1:
            node, network = _collective_shares(work, machine)
        case _:
            return {}
    shares = {"node": node, "network, out": network, "network, in": network}
    return {link: share for link, share in shares.items() if share}


def _collective_shares(work: Work, machine: Machine) -> tuple[float, float]:
    """Return the shares of the links within the node, and of the network."""
    _, link, per_node = _path(work.ranks, machine)
    if per_node == len(work.ranks):
        return 1.0, 0.0
    node, network = machine.links.node.bandwidth_gb_s, machine.links.network.bandwidth_gb_s
    if _is_exchange(work.name) and not work.permutes:
        near, far = (per_node - 1) / node, (len(work.ranks) - per_node) / network
        return near / max(near, far), far / max(near, far)
    if work.permutes:  # hops between nodes are the slowest ones
        return (network / node if per_node > 1 else 0.0), 1.0
    _, cards, _ = _nodes(work.ranks, machine.ranks_per_node)
    return (link.bandwidth_gb_s / node if per_node > 1 else 0.0), link.bandwidth_gb_s / (cards * network)


def _in_one_node(ranks: Sequence[int], machine: Machine) -> bool:
    return _nodes(tuple(ranks), machine.ranks_per_node)[0] == 1


def _is_exchange(name: str) -> bool:
    return "all_to_all" in name or "alltoall" in name


def send_seconds(size: int, machine: Machine, same_node: bool = False) -> float:
    """Return the time to send ``size`` bytes to one rank."""
    link = machine.links.node if same_node else machine.links.network
    return machine.links.start_us * 1e-6 + link.latency_us * 1e-6 + size / (link.bandwidth_gb_s * 1e9)
