"""A mutant: a one-line mistake that a developer could make, and the tests that should catch it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

PACKAGES = (
    "core", "nn", "models-llama", "models-qwen3", "models-hf", "optim",
    "parallel", "float8", "experts", "ckpt", "debug", "data", "inference", "launch", "cluster", "ft", "report",
    "simulate", "completion",
)  # fmt: skip
"""Short names of the packages: the distribution's without ``titan-``."""

SOURCES = {name: f"packages/titan-{name}/src/titan_{name.replace('-', '_')}" for name in PACKAGES}

_ACROSS = {
    "core": ("tests/integration/test_oracle.py", "tests/integration/test_dropout_and_buffers.py"),
    "ckpt": (
        "tests/integration/test_resume_on_meshes.py", "tests/integration/test_changed_jobs.py",
        "tests/integration/test_dropout_and_buffers.py", "tests/integration/test_fuzz.py",
    ),
    "nn": ("tests/models_llama", "tests/models_qwen3"),
    "parallel": ("tests/integration/test_oracle.py", "tests/integration/test_switches.py"),
    "optim": ("tests/integration/test_inherited_suites.py",),
}  # fmt: skip
WIDER = {name: (f"tests/{name.replace('-', '_')}", *_ACROSS.get(name, ())) for name in PACKAGES}
"""The tests to run if a mutant survives its own tests, by package."""


@dataclass(frozen=True)
class Mutant:
    """One change to one line."""

    name: str
    """Unique description of the mistake, in kebab case."""
    place: str
    """The file, with the short name of the package in place of its path: ``"core/api/parallel/step.py"``."""
    old: str
    """A text that occurs exactly once in the file."""
    new: str
    """The text that replaces it."""
    tests: tuple[str, ...]
    """The tests most likely to catch it, as arguments of pytest."""
    equivalent: str = ""
    """Why no test can catch it, if the program still behaves the same."""

    @property
    def package(self) -> str:
        """The short name of the package."""
        return self.place.partition("/")[0]

    @property
    def path(self) -> str:
        """The file, relative to the root of the repository."""
        package, _, rest = self.place.partition("/")
        return f"{SOURCES[package]}/{rest}"

    def flaw(self, root: Path) -> str:
        """Return why the mutant cannot be applied to the sources in ``root``; empty if it can."""
        file = root / self.path
        if not file.is_file():
            return f"{self.path} does not exist"
        count = file.read_text(encoding="utf-8").count(self.old)
        if count != 1:
            return f"{self.old!r} occurs {count} times in {self.path}, and must occur once"
        return "the mutant changes nothing" if self.old == self.new else ""

    def mutated(self, root: Path) -> str:
        """Return the contents of the file with the change.

        Raises:
            ValueError: the change cannot be applied.
        """
        if flaw := self.flaw(root):
            raise ValueError(f"mutant {self.name}: {flaw}")
        return (root / self.path).read_text(encoding="utf-8").replace(self.old, self.new)
