"""Simulates one rank of a job of any size: the real trainer, on fake tensors, in this process."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import flex_attention
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from titan_core.api import PendingUpdate, Run, RunEnd, StepReport, UserError, World, hookimpl
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.simulation import simulating
from titan_simulate.engine.data import SETTINGS as SETTINGS, with_simulated_data, with_simulated_weights
from titan_simulate.engine.fake_device import FakeDevice
from titan_simulate.engine.host_waits import HostWaits
from titan_simulate.engine.observation import Observation, OperationObserver, local
from titan_simulate.engine.result import BETWEEN_STEPS, AllocationTrace, Owner, PhaseFigures, SimulatedRank, StepFigures
from titan_simulate.engine.resumed import with_optimizer_state
from titan_simulate.engine.stub_libraries import Device, describe
from titan_simulate.engine.tensors import tensors_in
from titan_simulate.engine.world import fake_world, local_device

Train = Callable[[AssembledJob, Iterable[object]], RunEnd]
"""Trains a job in this process with observers: :meth:`titan_core.api.CommandContext.train`."""


def simulate(
    job: AssembledJob,
    train: Train,
    rank: int = 0,
    observers: Iterable[OperationObserver] = (),
    strict: bool = True,
    device: Device | None = None,
    resumed: bool = False,
    checks_model: bool = True,
) -> SimulatedRank:
    """Run ``job`` as ``rank`` of its world until its last step.

    The stub libraries must be loaded (:mod:`titan_simulate.engine.stub_libraries`). Data is random, weights are not loaded,
    and nothing is saved.

    Args:
        observers: receive every operator.
        strict: whether a wait of the host for the device within a step is an error.
        device: what to run on. Only the first simulation of a process can choose.
        resumed: whether the optimizer has its state before the first step, as in a run that resumes.
        checks_model: whether to check the model on a small copy.

    Raises:
        HostSync: the host waits for the device where it must not.
        UserError: the job cannot run, or has no such rank.
    """
    job = prepared(job, rank)
    if device is not None:
        describe(device)
    job = with_optimizer_state(job) if resumed else job
    engine = _Engine(job, rank, observers, strict, checks_model)
    with simulating(engine), own_error(engine.waits):
        end = train(job, [engine])
    if end.preempted or end.interrupted:  # a part of the steps must not pass for all of them
        raise UserError.one("the simulation", f"was ended by a signal after step {end.step}", "repeat it")
    return engine.result()


def prepared(job: AssembledJob, rank: int) -> AssembledJob:
    """Return what is run of ``job``: one stage, on random data, without weights, and nothing is saved or printed.

    Raises:
        UserError: it has no such rank.
    """
    size = job.mesh.world_size
    if not 0 <= rank < size:
        raise UserError.one(f"--rank {rank}", f"the job has {size} ranks", f"name one from 0 to {size - 1}")
    job = with_simulated_weights(with_simulated_data(job))
    silent = tuple(observer for observer in job.observers if not observer.first_rank)
    return replace(job, checkpoint=None, observers=silent, stages=(), stage=0)


@contextmanager
def own_error(waits: HostWaits) -> Iterator[None]:
    """Raise the error about a wait in place of those that it led to, in torch or in a plugin's guard."""
    try:
        yield
    except BaseException as error:
        if waits.error is None or waits.error is error:
            raise
        raise waits.error from error


@contextmanager
def observed(observation: Observation, waits: HostWaits) -> Iterator[None]:
    """Make tensors on the device fake, and observe what happens to them."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        observation.resized(storage)
        return result

    with ExitStack() as stack:
        setattr(torch.UntypedStorage, "resize_", resized)  # noqa: B010 (mypy: a method)
        stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
        waits.observer = observation.waited
        stack.enter_context(waits.watching())
        stack.enter_context(observation.modules.watching())
        stack.enter_context(observation.streams.watching())
        stack.enter_context(uncompiled())
        # A thread of autograd frees its last tensors when the backward pass has returned already, now and then after the
        # next allocation: the peak would vary from run to run.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(FakeDevice(waits, observation.seen))
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let ``torch.compile`` return code as it is, within the ``with`` block: the compiler takes seconds to import, and code
    that it has compiled would be observed as one operator, or not at all."""

    def as_it_is(model: Any = None, **options: Any) -> Any:
        return (lambda function: function) if model is None else model

    compiling, attending = torch.compile, flex_attention.flex_attention

    @wraps(attending)
    def attending_uncompiled(
        query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return attending(query, key, value, score_mod and _apart(score_mod), *args, **kwargs)

    setattr(torch, "compile", as_it_is)  # noqa: B010 (mypy: a function)
    setattr(flex_attention, "flex_attention", attending_uncompiled)  # noqa: B010
    try:
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            # True of what runs here, and not of the job: nothing is materialised.
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            yield
    finally:
        setattr(torch, "compile", compiling)  # noqa: B010
        setattr(flex_attention, "flex_attention", attending)  # noqa: B010


def _apart(score_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``score_mod`` as the compiler would see it, outside of the region in which it is called: FlexAttention
    differentiates it at once, for which a checkpoint would recompute the region."""

    def modify(*args: Any) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return score_mod(*args)

    return modify


@dataclass(eq=False)  # the plugin manager hashes observers
class _Engine:
    """The simulation that the core consults, and an observer of the run."""

    job: AssembledJob
    rank: int
    observers: Iterable[OperationObserver]
    strict: bool
    checks_model: bool
    waits: HostWaits = field(default_factory=HostWaits)
    computes: bool = False

    def __post_init__(self) -> None:
        self._observation = Observation(self.observers)
        self._steps: list[StepFigures] = []
        self._known_waits = 0
        self._resident: dict[Owner, int] = {}
        self._allocations = AllocationTrace()
        self._began = time.perf_counter()
        self._handles: list[Any] = []
        self._modules: dict[int, str] = {}  # address of a parameter -> its module

    @contextmanager
    def join(self, job: AssembledJob) -> Iterator[World]:
        """See :meth:`titan_core.toolkit.simulation.Simulation.join`."""
        collects = gc.isenabled()
        with ExitStack() as stack:
            world = stack.enter_context(fake_world(self.rank, job.mesh, local_device(self.rank)))
            stack.enter_context(observed(self._observation, self.waits))
            stack.callback(lambda: [handle.remove() for handle in self._handles])
            self._handles = [
                register_optimizer_step_pre_hook(self._optimizer_starts),
                register_optimizer_step_post_hook(self._optimizer_ends),
            ]
            gc.disable()  # what only it frees is counted at the end of each step
            stack.callback(gc.enable if collects else gc.disable)
            yield world

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Learn the model's modules, and to whom its tensors belong."""
        self._parts = run.parts
        for part in run.parts:
            self._observation.modules.know(part.module.named_modules(), part.layout.head[-1])
            self._modules |= {id(one): name.rpartition(".")[0] for name, one in part.module.named_parameters()}

    @hookimpl(tryfirst=True)
    def titan_step_start(self, step: int) -> None:
        """Begin a step: from now on the host must not wait."""
        if step == 1:
            self._own_the_model()
        self._steps.append(self._figures(self.waits.step))
        self._began = time.perf_counter()
        self.waits.begin_step(step)
        self._observation.enter("forward")
        self.waits.forbidden = self.strict and step > 1  # the first step initialises

    @hookimpl(trylast=True)
    def titan_gradients_complete(self, step: int) -> None:
        """Note the owner of the gradients."""
        for part in self._parts:
            for parameter in part.module.parameters():
                if parameter.grad is not None:
                    module = self._modules[id(parameter)]
                    self._observation.memory.own(local(parameter.grad), Owner.GRADIENTS, module=module)
        self._observation.enter("norm")

    @hookimpl(trylast=True)
    def titan_before_update(self, update: PendingUpdate) -> None:
        """Begin to clip."""
        self._observation.enter("clip")

    def _optimizer_starts(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._observation.enter("optimizer")

    def _optimizer_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, state in optimizer.state.items():
            for tensor in tensors_in(state):
                for memory in (self._observation.memory, self._observation.host_memory):
                    memory.own(local(tensor), Owner.OPTIMIZER, module=self._modules.get(id(parameter)))
        self._observation.enter("end of step")

    @hookimpl(tryfirst=True)
    def titan_step_end(self, report: StepReport) -> None:
        """End the step, and let observers read values if it is logged."""
        self._observation.enter(BETWEEN_STEPS)
        if report.logged:
            self.waits.forbidden = False

    @hookimpl(tryfirst=True)
    def titan_train_end(self, end: RunEnd) -> None:
        """Note what stays between steps."""
        self.waits.forbidden = False
        if not end.failed:
            self._steps.append(self._figures(self.waits.step))
            self._resident = self._observation.memory.resident()
            self._allocations = self._observation.memory.trace

    def _own_the_model(self) -> None:
        memories = self._observation.memory, self._observation.host_memory
        for part in self._parts:
            for memory in memories:
                for parameter in part.module.parameters():
                    memory.own(local(parameter), Owner.PARAMETERS, module=self._modules[id(parameter)])
                for buffer in part.module.buffers():
                    memory.own(local(buffer), Owner.BUFFERS)

    def _figures(self, step: int) -> StepFigures:
        live = self._observation.memory.live
        gc.collect()
        garbage = live - self._observation.memory.live
        memory, collectives, launches, flops = self._observation.take()
        phases = tuple(PhaseFigures(name, peak, end, launches[name], flops[name]) for name, (peak, end) in memory.items())
        waits = tuple(self.waits.found[self._known_waits :])
        self._known_waits = len(self.waits.found)
        return StepFigures(step, phases, collectives, waits, garbage, time.perf_counter() - self._began)

    def result(self) -> SimulatedRank:
        """Return what was found.

        Raises:
            UserError: the job took no step.
        """
        if len(self._steps) < 2:
            raise UserError.one("the simulation", "took no step", "set training.steps to at least 1")
        return SimulatedRank(
            rank=self.rank,
            world_size=self.job.mesh.world_size,
            mesh=str(self.job.mesh),
            device=torch.cuda.get_device_name(0),
            start=self._steps[0],
            steps=tuple(self._steps[1:]),
            resident=self._resident,
            on_host=self._observation.host_memory.most,
            allocations=self._allocations,
        )
