"""Runs CUDA code without a GPU: one rank of a job of any size, or a function, on fake CUDA tensors (titan-simulate)."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from titan_testing.jobs import make_job

if TYPE_CHECKING:
    from titan_simulate.engine.observation import Observation
    from titan_simulate.engine.result import SimulatedRank

T = TypeVar("T")

PRELOADED = ("titan_core.loop.training", "harness.fake_cuda")


class FakeCuda:
    """Calls functions in new processes, forked from one that has imported torch with a simulated device."""

    def __init__(self) -> None:
        from harness.fork_server import ForkServer

        self._server = ForkServer(PRELOADED)

    def train(
        self,
        recipe: str,
        overrides: Mapping[str, object] | None = None,
        world_size: int = 1,
        rank: int = 0,
        strict: bool = True,
        device: str = "NVIDIA H100 80GB HBM3",
        site: str | None = None,
    ) -> SimulatedRank:
        """Train ``recipe`` for two steps as ``rank`` of ``world_size`` ranks, on random data.

        Args:
            strict: whether a wait of the host for the device within the second step is an error. To check a step that is
                not logged to its end, take three steps, because the last one is logged.
            device: a name in ``titan_simulate.engine.stub_libraries.DEVICES``.
            site: a folder with further plugins.

        Raises:
            HostSync: the host waits.
            UserError: the job cannot run.
        """
        return self.call(train_simulated, recipe, dict(overrides or {}), world_size, rank, strict, device, site)

    def run(
        self, function: Callable[..., T], *args: Any, world_size: int = 1, rank: int = 0, strict: bool = False, **kwargs: Any
    ) -> T:
        """Return the result of the module-level ``function``, called where CUDA tensors are fake. Neither arguments nor
        result may hold them.

        Args:
            world_size: size of the default process group, of which only ``rank`` exists.
            strict: whether a wait of the host for the device is an error.
        """
        return self.call(_run, function, world_size, rank, strict, args, kwargs)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return the result of the module-level ``function``, called in a new process with simulated devices."""
        result: T = self._server.call(function, *args, **kwargs)
        return result

    def close(self) -> None:
        """End all processes."""
        self._server.close()


def why_not() -> str | None:
    """Return why there is no fake CUDA here, for the message of a skipped test; ``None`` if there is."""
    if importlib.util.find_spec("titan_simulate") is None:
        return "titan-simulate is not installed"
    from titan_simulate.engine.stub_libraries import reason

    return reason()


def train_simulated(
    recipe: str,
    overrides: dict[str, object],
    world_size: int,
    rank: int,
    strict: bool,
    device: str,
    site: str | None = None,
) -> SimulatedRank:
    """See :meth:`FakeCuda.train`."""
    from titan_core.loop.training import train
    from titan_simulate.engine.simulate import SETTINGS, simulate
    from titan_simulate.engine.stub_libraries import DEVICES

    sys.path[:0] = [site] if site is not None else []
    with tempfile.TemporaryDirectory() as folder:
        settings = {"training.steps": 2, "job.dump_folder": folder, **SETTINGS, **overrides}
        job = make_job(recipe, settings, world_size, missing_ok=True)
        return simulate(job, train, rank, strict=strict, device=DEVICES[device])


def _run(
    function: Callable[..., Any], world_size: int, rank: int, strict: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with fake_devices(rank, world_size, strict):
        return function(*args, **kwargs)


@contextmanager
def fake_devices(rank: int = 0, world_size: int = 1, strict: bool = False) -> Iterator[Observation]:
    """Within the ``with`` block, tensors on CUDA devices are fake, and the default process group has ``world_size`` ranks,
    of which only ``rank`` exists. Yields what is counted."""
    from titan_simulate.engine.host_waits import HostWaits
    from titan_simulate.engine.observation import Observation
    from titan_simulate.engine.simulate import observed, own_error
    from titan_simulate.engine.world import fake_process_group, local_device

    observation, waits = Observation(), HostWaits()
    waits.forbidden = strict
    with fake_process_group(rank, world_size), observed(observation, waits):
        local_device(rank)
        with own_error(waits):
            yield observation
