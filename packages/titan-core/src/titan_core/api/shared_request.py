"""Requests that reach one rank, and that all ranks serve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from titan_core.api.world import World


class SharedRequest:
    """A request that may reach any rank at any moment, by a signal, a file or a person, and that all ranks then serve at
    the same step. It travels with what ranks exchange before each step anyway (:mod:`titan_core.train.lookahead`)."""

    def __init__(self) -> None:
        self.asked = False
        """Whether this rank has a request that the others do not know of yet."""
        self.agreed = False
        """Whether all ranks know that some rank has a request; the same on each, within a step."""

    def ask(self) -> None:
        """Ask for it, on this rank; from any thread or signal handler."""
        self.asked = True

    def agree(self, told: bool, anywhere: bool) -> None:
        """All ranks have exchanged their requests.

        Args:
            told: whether this rank has passed its request on.
            anywhere: whether some rank has.
        """
        if told:
            self.asked = False
        self.agreed = self.agreed or anywhere

    def take(self) -> bool:
        """Whether it is to be done now, once; to be called by all ranks alike."""
        agreed, self.agreed = self.agreed, False
        return agreed


class SharedRequests:
    """Those of a run. All ranks have the same ones, since they exchange all of them together."""

    def __init__(self, requests: Iterable[SharedRequest] = ()) -> None:
        self._requests = list(requests)
        self._complete = False

    def __iter__(self) -> Iterator[SharedRequest]:
        return iter(self._requests)

    def new(self) -> SharedRequest:
        """One more.

        Raises:
            RuntimeError: the run has begun.
        """
        if self._complete:
            raise RuntimeError(
                "RunStart.shared_request was called after titan_train_start; ranks have begun to agree by then"
            )
        self._requests.append(SharedRequest())
        return self._requests[-1]

    def complete(self, world: World) -> None:
        """There will be no more; to be called by all ranks.

        Raises:
            RuntimeError: ranks have made different numbers of them.
        """
        self._complete = True
        counts: list[int] = world.gather(len(self._requests))
        other = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
        if other is not None:
            raise RuntimeError(
                f"rank 0 has {counts[0]} shared requests and rank {other} {counts[other]}: an observer calls "
                "RunStart.shared_request on some ranks alone; all have to call it alike"
            )
