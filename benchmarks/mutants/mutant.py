"""A mutant: a mistake that somebody could make in one line, and the tests that should notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

SOURCES = {
    "core": "packages/titan-core/src/titan_core",
    "ckpt": "packages/titan-ckpt/src/titan_ckpt",
    "parallel": "packages/titan-parallel/src/titan_parallel",
}
"""Short names of the packages."""

WIDER = {
    "core": ("tests/core", "tests/integration/test_oracle.py", "tests/integration/test_dropout_and_buffers.py"),
    "ckpt": (
        "tests/ckpt", "tests/integration/test_resume_on_meshes.py", "tests/integration/test_changed_jobs.py",
        "tests/integration/test_dropout_and_buffers.py", "tests/integration/test_fuzz.py",
    ),
    "parallel": ("tests/parallel", "tests/integration/test_oracle.py", "tests/integration/test_switches.py"),
}  # fmt: skip
"""What is tried where a mutant's own tests have let it live."""


@dataclass(frozen=True)
class Mutant:
    """One change to one line."""

    name: str
    """What goes wrong, in kebab case; unique."""
    place: str
    """The file: ``"core/api/step.py"``, with the package's short name in the place of its path."""
    old: str
    """A text that occurs exactly once in the file."""
    new: str
    """What stands in its place."""
    tests: tuple[str, ...]
    """Those most likely to notice, as pytest's arguments."""
    equivalent: str = ""
    """Why no test can notice, where that is so: the program still does the same."""

    @property
    def package(self) -> str:
        """The short name of the package."""
        return self.place.partition("/")[0]

    @property
    def path(self) -> str:
        """The file, from the repository's root."""
        package, _, rest = self.place.partition("/")
        return f"{SOURCES[package]}/{rest}"

    def flaw(self, root: Path) -> str:
        """Why the mutant cannot be made of the sources in ``root``; empty where it can."""
        file = root / self.path
        if not file.is_file():
            return f"{self.path} is not there"
        count = file.read_text(encoding="utf-8").count(self.old)
        if count != 1:
            return f"{self.old!r} occurs {count} times in {self.path}, and must occur once"
        return "the mutant changes nothing" if self.old == self.new else ""

    def mutated(self, root: Path) -> str:
        """The file's text with the change.

        Raises:
            ValueError: it cannot be made.
        """
        if flaw := self.flaw(root):
            raise ValueError(f"mutant {self.name}: {flaw}")
        return (root / self.path).read_text(encoding="utf-8").replace(self.old, self.new)
