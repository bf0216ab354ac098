"""Fixtures of all suites."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.dont_write_bytecode:
    # Compiling torch's sources takes 3 s of each of the many processes that import it. Where bytecode is unwanted beside the
    # sources, it goes to the virtual environment. This must come before the imports.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(sys.prefix) / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, which reads it once

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from harness.fake_cuda import FakeCuda, why_not
from harness.leftovers import Leftovers, seed, settings_undone
from harness.quick import mark_other_rows, mark_parts, mark_slow
from harness.suites import disabled_in
from titan_testing.gloo_pool import release_models

TESTS = Path(__file__).parent
GPU_TESTS_DEVICE = "TITAN_GPU_TESTS_DEVICE"
"""Environment variable: "cpu" runs the tests marked `gpu` on the CPU, except those of what exists on GPUs only."""

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Processes that tests start find the harness too, whose plugin has the model that they train.
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]))
# A busy machine is no failure of the code, and the first example may import a library.
settings.register_profile("titan", deadline=None)
settings.load_profile("titan")
# A shell lets what it starts in the background ignore interrupts, which processes that tests start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _isolate(path: Path) -> None:
    """A package's suite sees its own plugins and the core's alone, as where nothing else is installed."""
    os.environ["TITAN_DISABLE_PLUGINS"] = ",".join(disabled_in(path))


def pytest_collectstart(collector: pytest.Collector) -> None:
    _isolate(collector.path)  # modules may look for plugins when they are imported


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _isolate(item.path)


@pytest.fixture(scope="session")
def fake_cuda() -> Iterator[FakeCuda]:
    """Runs CUDA code on fake CUDA tensors."""
    reason = why_not()
    if reason is not None:
        # Nothing but a CUDA build of torch, its headers and a C compiler can stand in for a GPU.
        pytest.skip(f"no GPU can be simulated here: {reason}")
    simulated = FakeCuda()
    yield simulated
    simulated.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "fake_cuda" in getattr(item, "fixturenames", ()):
            item.add_marker("fake_cuda")
            item.add_marker("full")  # each takes seconds; `-m fake_cuda` runs them all
    mark_slow(config, items)
    mark_other_rows(items)
    mark_parts(items)


@pytest.fixture
def device() -> torch.device:
    """The device of a test marked ``gpu`` that would compute the same on a CPU."""
    if os.environ.get(GPU_TESTS_DEVICE) == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        # Most machines have no GPU. What these tests claim for the CPU, the other suites test.
        pytest.skip(f"needs a CUDA device ({GPU_TESTS_DEVICE}=cpu runs it on the CPU, to check the test itself)")
    return torch.device("cuda", 0)


@pytest.fixture
def cuda() -> torch.device:
    """The device of a test marked ``gpu`` of something that exists on GPUs only."""
    if not torch.cuda.is_available():
        # Measures or drives the hardware itself (kernels, the allocator, NCCL), for which fake tensors are no substitute.
        pytest.skip("needs a CUDA device: what it tests exists only there")
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _own_process_state(pytestconfig: pytest.Config) -> Iterator[None]:
    """Nothing that a test does to its process reaches the tests after it, whichever they are: settings are undone; threads,
    processes, variables that the launcher sets for ranks, and runs in the repository fail the test that leaves them."""

    def variables() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("TITAN_")}

    release_models()
    os.chdir(pytestconfig.rootpath)
    seed()
    before, runs, leftovers = variables(), set(pytestconfig.rootpath.glob("*/config.toml")), Leftovers()
    with settings_undone():
        yield
        after = variables()
    assert after == before
    assert set(pytestconfig.rootpath.glob("*/config.toml")) == runs, "a run in the repository: use `in_tmp`"
    assert not (found := leftovers.found()), f"the test has ended, and these have not: {found}"


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
