"""Requests that reach one rank and are served by all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from titan_core.api.parallel.world import World


class SharedRequest:
    """A request that may reach any rank at any time, by a signal, a file or a person. All ranks serve it at the same step.
    It is exchanged together with other values that ranks exchange before each step (:mod:`titan_core.loop.lookahead`)."""

    def __init__(self) -> None:
        self.pending = False
        """Whether this rank has a request that the other ranks do not know yet."""
        self.agreed = False
        """Whether all ranks know that some rank has a request; the same on all ranks, within a step."""

    def submit(self) -> None:
        """Make the request on this rank. Safe in any thread or signal handler."""
        self.pending = True

    def agree(self, sent: bool, anywhere: bool) -> None:
        """Record an exchange of requests between all ranks.

        Args:
            sent: whether this rank has sent its request.
            anywhere: whether some rank has sent a request.
        """
        if sent:
            self.pending = False
        self.agreed = self.agreed or anywhere

    def take(self) -> bool:
        """Return once whether the request must be served now. All ranks must call it together."""
        agreed, self.agreed = self.agreed, False
        return agreed


class SharedRequests:
    """The shared requests of a run. All ranks must create the same ones, because they are exchanged together."""

    def __init__(self, requests: Iterable[SharedRequest] = ()) -> None:
        self._requests = list(requests)
        self._complete = False

    def __iter__(self) -> Iterator[SharedRequest]:
        return iter(self._requests)

    def new(self) -> SharedRequest:
        """Create another request.

        Raises:
            RuntimeError: the run has begun.
        """
        if self._complete:
            raise RuntimeError(
                "Run.shared_request was called after titan_train_start; by then, ranks have begun to exchange requests"
            )
        self._requests.append(SharedRequest())
        return self._requests[-1]

    def complete(self, world: World) -> None:
        """Declare that no more requests will be created. All ranks must call it.

        Raises:
            RuntimeError: ranks have created different numbers of requests.
        """
        self._complete = True
        counts: list[int] = world.gather(len(self._requests))
        other = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
        if other is not None:
            raise RuntimeError(
                f"rank 0 has {counts[0]} shared requests and rank {other} has {counts[other]}: an observer calls "
                "Run.shared_request on some ranks only; all ranks must call it equally often"
            )

    def exchange(self, world: World) -> None:
        """Exchange the requests where no step follows. All ranks must call it."""
        sent = [request.pending for request in self._requests]  # read once, because a signal may arrive at any time
        ranks = world.gather(sent)
        for number, request in enumerate(self._requests):
            request.agree(sent[number], any(of_rank[number] for of_rank in ranks))
