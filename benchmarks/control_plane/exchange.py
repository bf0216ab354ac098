"""Collectives of small values: Titan's real functions on one rank, and the values of all other ranks handed to them."""

from __future__ import annotations

import functools
import pickle
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.control_plane.table import Cost, Row
from titan_ckpt.contents.state import generator_states
from titan_core.api import UserError, World
from titan_core.api.observe.shared_request import SharedRequests
from titan_core.api.parallel import tree, world as worlds
from titan_core.api.parallel.tree import gather_objects, gather_on_first
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.data.loader import StepData
from titan_core.loop import world as joining
from titan_core.loop.lookahead import Lookahead

DATASETS = 2
STAGES = 8
TENSORS = 100


class OtherRanks:
    """Stands for ``torch.distributed`` on ``rank`` of ``ranks``: hands over what the others would send over the tree
    (:mod:`titan_core.api.parallel.tree`), and counts messages and bytes. The time that it takes itself is in
    :attr:`serving`."""

    def __init__(self, rank: int, ranks: int, value_of: Callable[[int], object] | None = None, whole: bool = False) -> None:
        """
        Args:
            value_of: the value of each rank; without it, all have this rank's.
            whole: whether the values are exchanged at once, without digests.
        """
        self.rank, self.ranks, self.cost, self.serving = rank, ranks, Cost(), 0.0
        pickled: dict[int, bytes] = {}
        values = [] if value_of is None else [value_of(other) for other in range(ranks)]
        self._pickles = [pickled.setdefault(id(value), pickle.dumps(value)) for value in values]
        self._own = b""
        self._summed: Tensor | None = None
        self._whole = whole
        """Whether the values themselves are exchanged, because their digests differ."""
        self._messages: list[Tensor] = []
        """What the peer of this round has still to send."""

    @contextmanager
    def _serve(self, messages: int, num_bytes: int) -> Iterator[None]:
        self.cost.messages += messages
        self.cost.num_bytes += num_bytes
        started = time.thread_time()
        yield
        self.serving += time.thread_time() - started

    def get_rank(self, group: object = None) -> int:
        return self.rank

    def get_world_size(self, group: object = None) -> int:
        return self.ranks

    def is_initialized(self) -> bool:
        return True

    def isend(self, tensor: Tensor, **_: object) -> SimpleNamespace:
        with self._serve(1, tensor.nbytes):
            return SimpleNamespace(wait=lambda: None)

    def send(self, tensor: Tensor, **more: object) -> None:
        self.isend(tensor, **more)

    def recv(self, tensor: Tensor, group_src: int, **_: object) -> None:
        with self._serve(1, tensor.nbytes):
            block = self.block(group_src)
            if self._summed is not None:
                tensor.copy_(self._summed * len(block))
                return
            self._messages = self._messages or tree.messages_of(self.answer(block))
            tensor.copy_(self._messages.pop(0))

    def block(self, peer: int) -> range:
        """Return the ranks whose values ``peer`` sends to this one: all if it is the parent, or it and its descendants."""
        if peer < self.rank:
            return range(self.ranks)
        return range(peer, min(peer + (peer & -peer), self.ranks))

    def answer(self, block: range) -> dict[Any, Any]:
        """Return what the ranks of ``block`` have found out together."""
        key = functools.cache(lambda pickled: tree.key_of(pickled, self._whole))
        found: dict[bytes, list[int]] = {}
        for rank in block:
            spans = found.setdefault(key(self._pickles[rank]) if self._pickles else self._own, [])
            if spans and spans[-1] == rank:
                spans[-1] += 1
            else:
                spans += rank, rank + 1
        return found

    def all_reduce(self, tensor: Tensor, *_: object, **__: object) -> SimpleNamespace:
        """The sum, if all ranks have this rank's values. Sent and received in a ring, twice round."""
        hops = 4 * (self.ranks - 1)
        with self._serve(hops, 4 * tensor.nbytes * (self.ranks - 1) // self.ranks):
            tensor.mul_(self.ranks)
        return SimpleNamespace(wait=lambda: None)

    def measure(self, work: Callable[[], object]) -> Cost:
        """Call ``work`` as this rank; return its cost. What a job does in the background counts too."""
        merged, sums = tree.merged, tree.reduce_over_tree

        def merge(own: dict[bytes, list[int]], rank: int, size: int, group: Any) -> dict[bytes, list[int]]:
            self._own = next(iter(own))
            self._whole = bool(self._pickles) and self._own == tree.key_of(self._pickles[rank], whole=True)
            return merged(own, rank, size, group)

        def add(tensor: Tensor, *arguments: Any) -> None:
            self._summed = tensor.clone()
            sums(tensor, *arguments)

        def at_once(work: Callable[[], Any]) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(work())
            return future

        with (
            patch.multiple(worlds, dist=self, in_background=at_once, reduce_over_tree=add),
            patch.multiple(tree, dist=self, merged=merge),
            self.cost.timed(),
        ):
            work()
        self.cost.seconds -= self.serving
        return self.cost


def same_job(job: AssembledJob, ranks: int, one_differs: bool) -> Row:
    """Compare the jobs of all ranks; with ``one_differs``, rank 1 has other packages, and all ranks name it."""

    def cost(rank: int) -> Cost:
        identity = job.identity()
        different = SimpleNamespace(
            digest=lambda: "0" * len(job.digest()), identity=lambda: {**identity, "plugins": "others"}
        )
        mine = SimpleNamespace(digest=job.digest, identity=lambda: identity)
        total = Cost()

        def gather(value: object) -> list[Any]:
            other = different.digest() if isinstance(value, str) else different.identity()
            others = OtherRanks(rank, ranks, lambda at: other if one_differs and at == 1 else value)
            found: list[Any] = []
            cost = others.measure(lambda: found.extend(gather_objects(value)))
            for name in ("seconds", "messages", "num_bytes"):
                setattr(total, name, getattr(total, name) + getattr(cost, name))
            return found

        with patch.object(joining, "gather_objects", gather):
            try:
                joining.require_same_job(cast(AssembledJob, mine))
            except UserError as error:
                if not one_differs or error.problems[0].where != "rank 1":
                    raise
            else:
                assert not one_differs
        return total

    name = "b same job: one rank differs" if one_differs else "b same job: all agree"
    return Row(name, ranks, cost(0), cost(ranks - 1))


def stages(ranks: int) -> Row:
    """Gather the names, shapes and dtypes of tensors, of which ranks have as many different sets as pipeline stages."""
    sets = [{f"stage{stage}.layer{n}.weight": ((4096, 4096), "float32") for n in range(TENSORS)} for stage in range(STAGES)]
    return _gathering(
        f"b tensors' names, {STAGES} pipeline stages", ranks, lambda rank: sets[rank * STAGES // ranks], gather_objects
    )


def generators(ranks: int) -> Row:
    """Gather the states of the random generators, which have only been seeded, on rank 0."""
    kept = torch.get_rng_state(), random.getstate()
    states = seeded_generators(0)
    assert states == seeded_generators(ranks - 1)
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    return _gathering("b random generators, seeded", ranks, lambda rank: states, gather_on_first)


def seeded_generators(rank: int) -> dict[str, Any]:
    """Return what a rank with data of its own saves of random generators that it has only seeded."""
    torch.manual_seed(rank)
    random.seed(rank)
    return generator_states(cast(World, SimpleNamespace(device=torch.device("cpu"), data_rank=rank)))


def _gathering(part: str, ranks: int, value_of: Callable[[int], object], gather: Callable[[Any], object]) -> Row:
    def cost(rank: int) -> Cost:
        own = value_of(rank)
        others = OtherRanks(rank, ranks, value_of, whole=gather is gather_on_first)
        return others.measure(lambda: gather(own))

    return Row(part, ranks, cost(0), cost(ranks - 1))


class _Loader:
    def peek(self) -> StepData:
        return StepData([], 0, [1000] * DATASETS, 1000.0 * DATASETS)


def counts(ranks: int, requests: int) -> Row:
    """Exchange one step's counts, and whether a rank has one of the shared ``requests``."""

    def cost(rank: int) -> Cost:
        plan = SimpleNamespace(world_size=ranks, dims=(), diverging_replicas=1)
        world = World(rank, torch.device("cpu"), cast(Any, plan), cast(Any, {}))
        shared = SharedRequests()
        made = [shared.new() for _ in range(requests)]
        lookahead = Lookahead(cast(Any, _Loader()), world, shared, DATASETS)
        for request in made:
            request.submit()

        def step() -> None:
            lookahead.begin(lambda: False)
            totals = lookahead.take()
            assert totals.num_targets == 1000 * DATASETS * ranks

        spent = OtherRanks(rank, ranks).measure(step)
        assert all(request.take() for request in made)
        return spent

    name = f"c counts of a step, with {requests} requests (d)" if requests else "c counts of a step"
    return Row(name, ranks, cost(0), cost(ranks - 1))
