"""Rendezvous: a real ``TCPStore`` in a process of its own, and a real client for each rank."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist

from benchmarks.control_plane.table import Cost, Row
from titan_core.api.parallel import tree
from titan_core.toolkit.open_files import allow_open_files

ADDRESS_BYTES = 140
"""Size of a gloo address in the store, about."""


def peers(rank: int, ranks: int) -> list[int]:
    """Return the ranks that ``rank`` exchanges something with: those of the tree of sums, values and broadcasts, and, if the
    ranks are few, its neighbours in the ring of sums."""
    parent, children = tree.relatives(rank, ranks)
    ring = [(rank - 1) % ranks, (rank + 1) % ranks] if ranks <= tree.LONGEST_RING else []
    return sorted({*children, *ring, *([] if parent is None else [parent])} - {rank})


def _serve(to: Connection, ranks: int) -> None:
    allow_open_files(ranks)
    before = len(os.listdir("/proc/self/fd"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
    started = time.process_time()
    to.send(store.port)
    to.recv()
    to.send((time.process_time() - started, len(os.listdir("/proc/self/fd")) - before))
    to.recv()


def rendezvous(ranks: int) -> Row:
    """Measure what ``init_process_group`` and the first collectives do with the store, in the order that gloo does it."""
    allow_open_files(ranks)
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    server = fork.Process(target=_serve, args=(there, ranks), daemon=True)
    server.start()
    there.close()
    port = here.recv()
    address = "x" * ADDRESS_BYTES
    sent = [0] * ranks
    stores: list[dist.Store] = []  # type: ignore[name-defined]  # public, but not exported to type checkers
    before = len(os.listdir("/proc/self/fd"))

    def join(rank: int) -> dist.Store:  # type: ignore[name-defined]  # as above
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(minutes=5))
        store.set(f"default_pg/0//{rank}", address)
        return store

    def connect(rank: int) -> None:
        for peer in peers(rank, ranks):
            stores[rank].wait([f"default_pg/0//{peer}"])
            stores[rank].get(f"default_pg/0//{peer}")
            sent[rank] += 2

    started = time.process_time()
    with ThreadPoolExecutor(16) as threads:
        stores += threads.map(join, range(ranks))
        sockets = len(os.listdir("/proc/self/fd")) - before
        list(threads.map(connect, range(ranks)))
    clients = time.process_time() - started
    here.send(None)
    serving, accepted = here.recv()
    stores.clear()
    here.send(None)
    server.join()
    operations = [1 + waits for waits in sent]
    each = clients / sum(operations)
    key = len("default_pg/0//") + len(str(ranks))
    typical = ranks - 1

    def cost(rank: int) -> Cost:
        looked_up = sent[rank] // 2
        moved = key + ADDRESS_BYTES + looked_up * (2 * key + ADDRESS_BYTES)
        return Cost(each * operations[rank], 2 * operations[rank], moved, round(sockets / ranks) + looked_up)

    first, served = cost(0), sum(operations)
    first.seconds += serving
    first.messages += 2 * served
    first.num_bytes += sum(cost(rank).num_bytes for rank in range(ranks))
    first.descriptors += accepted
    return Row("a rendezvous, store on rank 0", ranks, first, cost(typical))
