"""What one rank is asked for, and all ranks do."""

from __future__ import annotations


class SharedRequest:
    """Something that any rank may be asked for at any moment, by a signal, a file or a person, and that all ranks then do at
    the same step. It travels with what ranks tell each other before each step anyway (:mod:`titan_core.train.lookahead`)."""

    def __init__(self) -> None:
        self.asked = False
        """Whether this rank was asked, and has not told the others yet."""
        self.agreed = False
        """Whether all ranks know that some rank was asked; the same on each, within a step."""

    def ask(self) -> None:
        """Ask for it, on this rank; from any thread or signal handler."""
        self.asked = True

    def agree(self, told: bool, anywhere: bool) -> None:
        """All ranks have told each other.

        Args:
            told: whether this rank has told that it was asked.
            anywhere: whether some rank has.
        """
        if told:
            self.asked = False
        self.agreed = self.agreed or anywhere

    def take(self) -> bool:
        """Whether it is to be done now, once; to be called by all ranks alike."""
        agreed, self.agreed = self.agreed, False
        return agreed
