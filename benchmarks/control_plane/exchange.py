"""Collectives of small values: Titan's real functions on one rank, and the values of all other ranks handed to them."""

from __future__ import annotations

import hashlib
import pickle
import random
import time
from collections.abc import Callable, Iterator, Sequence
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
from titan_core.api.parallel import world as worlds
from titan_core.api.parallel.world import gather_objects
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.data.loader import StepData
from titan_core.loop import world as joining
from titan_core.loop.lookahead import Lookahead

DATASETS = 2
STAGES = 8
TENSORS = 100


class OtherRanks:
    """Stands for ``torch.distributed`` on ``rank`` of ``ranks``: hands over what the others would send, and counts messages
    and bytes by the model in the benchmark's output. The time that it takes itself is in :attr:`serving`."""

    def __init__(self, rank: int, ranks: int, value_of: Callable[[int], object] = lambda rank: None) -> None:
        self.rank, self.ranks, self.cost, self.serving = rank, ranks, Cost(), 0.0
        pickled: dict[int, bytes] = {}
        values = [value_of(other) for other in range(ranks)]
        self.pickles = [pickled.setdefault(id(value), pickle.dumps(value)) for value in values]

    @contextmanager
    def _serve(self, messages: int, num_bytes: int) -> Iterator[None]:
        self.cost.messages += messages
        self.cost.num_bytes += num_bytes
        started = time.thread_time()
        yield
        self.serving += time.thread_time() - started

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.ranks

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor) -> None:
        hops = 2 * (self.ranks - 1)
        with self._serve(hops, hops * own.nbytes):
            known: dict[int, Tensor] = {}
            for output, value in zip(outputs, self.pickles, strict=True):
                if id(value) not in known:
                    digest = hashlib.sha256(value).digest() + len(value).to_bytes(8)
                    known[id(value)] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
                output.copy_(known[id(value)])

    def broadcast(self, tensor: Tensor, src: int) -> None:
        place = (self.rank - src) % self.ranks
        depth = (self.ranks - 1).bit_length()
        below = depth if place == 0 else sum(place + bit < self.ranks for bit in _lower_bits(place))
        messages = below + (place != 0)
        with self._serve(messages, messages * tensor.nbytes):
            tensor.copy_(torch.frombuffer(bytearray(self.pickles[src]), dtype=torch.uint8))

    def all_gather_object(self, outputs: list[Any], value: object) -> None:
        """Unpickles each rank's value, as torch does: part of the rank's own time."""
        hops = 2 * (self.ranks - 1)
        with self._serve(2 * hops, hops * (8 + max(map(len, self.pickles)))):
            pass
        pickle.dumps(value)
        outputs[:] = map(pickle.loads, self.pickles)

    def all_reduce(self, tensor: Tensor, *_: object, **__: object) -> SimpleNamespace:
        """The sum, if all ranks have this rank's values. Sent and received in a ring, twice round."""
        hops = 4 * (self.ranks - 1)
        with self._serve(hops, 4 * tensor.nbytes * (self.ranks - 1) // self.ranks):
            tensor.mul_(self.ranks)
        return SimpleNamespace(wait=lambda: None)

    def measure(self, work: Callable[[], object]) -> Cost:
        """Call ``work`` as this rank; return its cost."""
        with patch.object(worlds, "dist", self), self.cost.timed():
            work()
        self.cost.seconds -= self.serving
        return self.cost


def _lower_bits(place: int) -> list[int]:
    return [1 << bit for bit in range((place & -place).bit_length() - 1)]


def same_job(job: AssembledJob, ranks: int, one_differs: bool) -> Row:
    """Compare the jobs of all ranks; with ``one_differs``, rank 1 has other packages, and all ranks name it."""

    def cost(rank: int) -> Cost:
        other = {**job.identity(), "plugins": "others"}
        differs = [one_differs and at == 1 for at in range(ranks)]
        digest, identity, another = job.digest(), job.identity(), "0" * len(job.digest())
        digests = OtherRanks(rank, ranks, lambda at: another if differs[at] else digest)
        identities = OtherRanks(rank, ranks, lambda at: other if differs[at] else identity)
        exchanges = iter((digests, identities))

        def gather(value: object) -> list[Any]:
            ranks_of = next(exchanges)
            with patch.object(worlds, "dist", ranks_of):
                return gather_objects(value)

        total = Cost()
        mine = cast(AssembledJob, SimpleNamespace(digest=job.digest, identity=job.identity))
        with patch.object(joining, "gather_objects", gather), total.timed():
            try:
                joining.require_same_job(mine)
            except UserError as error:
                if not one_differs or error.problems[0].where != "rank 1":
                    raise
            else:
                assert not one_differs
        for part in (digests, identities):
            total.seconds -= part.serving
            total.messages += part.cost.messages
            total.num_bytes += part.cost.num_bytes
        return total

    name = "b same job: one rank differs" if one_differs else "b same job: all agree"
    return Row(name, ranks, cost(0), cost(ranks - 1))


def stages(ranks: int) -> Row:
    """Gather the names, shapes and dtypes of tensors, of which ranks have as many different sets as pipeline stages."""
    sets = [{f"stage{stage}.layer{n}.weight": ((4096, 4096), "float32") for n in range(TENSORS)} for stage in range(STAGES)]
    return _gathering(f"b tensors' names, {STAGES} pipeline stages", ranks, lambda rank: sets[rank * STAGES // ranks])


def generators(ranks: int) -> Row:
    """Gather the states of the random generators, which have another seed on every rank, and have not been drawn from."""
    found = seeded_generators(ranks)
    return _gathering("b random generators, all different", ranks, found.__getitem__)


def seeded_generators(ranks: int) -> list[dict[str, Any]]:
    """Return what each rank saves of random generators that it has only seeded."""
    found = []
    kept = torch.get_rng_state(), random.getstate()
    for rank in range(ranks):
        torch.manual_seed(rank)
        random.seed(rank)
        found.append(generator_states(torch.device("cpu")))
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    return found


def _gathering(part: str, ranks: int, value_of: Callable[[int], object]) -> Row:
    def cost(rank: int) -> Cost:
        own = value_of(rank)
        return OtherRanks(rank, ranks, value_of).measure(lambda: gather_objects(own))

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
