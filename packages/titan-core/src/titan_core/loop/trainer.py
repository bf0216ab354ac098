"""The trainer: builds what one stage of a run needs, and runs its loop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from titan_core.api import (
    Batch,
    CheckpointStore,
    ObjectiveFunction,
    PendingUpdate,
    Phase,
    Run,
    RunEnd,
    StepAbandoned,
    StepInput,
    StepReport,
    TrainState,
    UserError,
    ValidationReport,
    World,
)
from titan_core.api.config.sections import CommSection, MetricsSection, TrainingSection
from titan_core.api.observe.shared_request import SharedRequests
from titan_core.api.parallel.microbatch import AuxiliaryLosses, MetricSums
from titan_core.api.parallel.model_part import require_scalar
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.plugins.errors import shown
from titan_core.data.first_documents import check_first_documents
from titan_core.data.loader import StepData, data_loader
from titan_core.data.streams import OpenedData
from titan_core.loop.build import (
    build_checkpoint_store,
    build_lr_scheduler,
    build_optimizer,
    build_step_runner,
    register_transform_observers,
)
from titan_core.loop.interruption import Interruption
from titan_core.loop.lookahead import Lookahead, StepTotals
from titan_core.loop.losses import LossSums, MetricMeans, StatisticSums
from titan_core.loop.optimizer_step import GuardedSteps, MissingGradients, clip_gradients, global_norm, local_gradients
from titan_core.loop.process_settings import CollectiveTimeouts, prepare_numerics
from titan_core.loop.reference_model import with_reference_model
from titan_core.loop.results import end_of_run, last_checkpoint, warn_if_unsaved
from titan_core.loop.stored_models import load_pretrained
from titan_core.loop.validation import Validation
from titan_core.model.build import build_parts, build_whole
from titan_core.model.counted_flops import size_of
from titan_core.model.freeze import require_trained
from titan_core.model.materialise import not_loaded
from titan_core.model.preserved import evaluation, other_objective, repeat_backward, repeat_forward
from titan_core.optim.lr_schedule import advance
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.runlog.event_log import EventLog
from titan_core.runlog.reporter import MetricsReporter
from titan_core.runlog.run_directory import RunDirectory
from titan_core.runlog.time_by_cause import SpentTime, Stopwatch
from titan_core.toolkit.status import phase

log = logging.getLogger(__name__)


class Trainer:
    """All objects of a stage of a run, and its loop."""

    def __init__(
        self,
        job: AssembledJob,
        world: World,
        data: OpenedData,
        lifecycle: Lifecycle,
        directory: RunDirectory,
        interruption: Interruption | None = None,
        spent: SpentTime | None = None,
    ) -> None:
        self.job = job
        self.world = world
        self.lifecycle = lifecycle
        self.interruption = interruption or Interruption()
        self.spent = spent or SpentTime()
        self.training = job.config.section(TrainingSection)
        stop = self.training.stop_at_step
        self.steps = self.training.steps if stop is None else min(self.training.steps, stop)
        self.last_step = min(self.steps, job.end_step)
        prepare_numerics(self.training, world)

        with phase("reading the first documents"):
            for spec, sources in ((job.data, data.training), (job.validation, data.validation)):
                if spec is not None:
                    check_first_documents(spec, sources, world)
        self.loader = data_loader(job, data.training, world.data_rank, pin=world.device.type == "cuda")
        with phase("building the model"):
            whole = build_whole(job)
            if not job.added:
                require_trained(whole)
            self.size = size_of(whole, job)
            parts = build_parts(job, world.mesh, world.device, whole, world)
        self.run_alone = build_step_runner(job, world, parts)
        self.run_step = with_reference_model(job, world, self.run_alone, parts)
        register_transform_observers(job, world, parts, lifecycle)
        named = [pair for part in parts for pair in part.named_parameters()]
        self.parameters = [parameter for _, parameter in named]
        self.loss_sums = LossSums(world, parts)
        self.metric_means = MetricMeans(world, parts)
        self.statistic_sums = StatisticSums(world, parts)
        self.missing_gradients = MissingGradients(named, world, lifecycle)
        with phase("building the optimizer"):
            optimizer = build_optimizer(job, world, parts)
        self.state = TrainState(parts, optimizer, build_lr_scheduler(job, optimizer), self.loader)
        self.checkpoints = build_checkpoint_store(job, world, self.state, lifecycle, directory)
        resumed = False
        if self.checkpoints is not None:
            with phase("loading the checkpoint"):
                resumed = self._restored(self.checkpoints)
        if not resumed:
            self.state.origin = load_pretrained(job, world, parts)
        world.raise_together(not_loaded(parts))
        world.on_first_rank(lambda: directory.begin(job, self.state.step))
        self.events = EventLog(directory.path, world, self.spent)
        lifecycle.register(self.events)
        lifecycle.register(CollectiveTimeouts(job.config.section(CommSection)))
        self.validation: Validation | None = None
        self.last_report: StepReport | None = None
        self.last_validation: ValidationReport | None = None
        self.prepare_restart: Callable[[], None] | None = None
        if job.validation is not None:
            self.validation = Validation(
                job, job.validation, data.validation, world, parts, self.run_step, self.interruption.stop
            )
        self.requests = SharedRequests([self.interruption.stop, self.interruption.interrupt, self.interruption.save])
        self.updates = GuardedSteps(optimizer, on_host=self.training.enable_cpu_offload)
        self.lookahead = Lookahead(self.loader, world, self.requests, len(job.data.datasets))
        self.stopwatch = Stopwatch(world.device)
        self.metrics = MetricsReporter(job, world, self.state, lifecycle, self.stopwatch, self.spent, self.events)

    def run(self) -> RunEnd:
        """Train until the last step or the end of the data."""
        state, before = self.state, self.state.step
        if self.world.rank == 0:
            warn_if_unsaved(self.job)
        self.lifecycle.train_start(self.run_start())
        self.lifecycle.watch(self.parameters)
        self.requests.complete(self.world)
        self.lifecycle.save_state()  # fails now, rather than at the first checkpoint, if a state cannot be saved
        compiles = any(transform.phase is Phase.COMPILE for transform in self.job.transforms)
        self.spent.change("compile" if compiles else "steps")
        with phase("first step (compiling)" if compiles else "first step"):
            more = state.step < self.last_step and self.step()
        self.spent.change("steps")
        while more and state.step < self.last_step:
            more = self.step()
        if self.prepare_restart is not None:
            return RunEnd(state.step, False, "starts again", restarts=True, dump_folder=self.job.dump_folder)
        if before < state.step < self.last_step or self.last_step == 0:
            self.save(last=True)
        self.validate(last=state.step > before and not self.stage_ends)
        self.lifecycle.flush(state.step)
        if self.stage_ends:  # no step follows here, before which ranks would exchange their requests
            self.requests.exchange(self.world)
        end = end_of_run(state.step, self.last_step, self.job, self.interruption)
        return replace(
            end,
            loss=None if self.last_report is None else self.last_report.loss.item(),
            validation_loss=None if self.last_validation is None else self.last_validation.loss,
            checkpoint=last_checkpoint(self.checkpoints, end, warns=self.world.rank == 0),
            dump_folder=self.job.dump_folder,
        )

    def run_start(self) -> Run:
        """Return the facts that observers receive before the first step."""
        return Run(
            job=self.job,
            world=self.world,
            parts=self.state.parts,
            state=self.state,
            observers=self.lifecycle,
            size=self.size,
            step=self.state.step,
            steps=self.steps,
            dump_folder=self.job.dump_folder,
            attempt=self.world.on_first_rank(time.time),
            report=self.lifecycle.finding,
            shared_request=self.requests.new,
            evaluation=self._evaluation,
            compute=self._compute,
            log=self.lifecycle.metrics,
            validate=self._validate,
            restart=self._restart,
            show=self.lifecycle.sample,
        )

    @property
    def stage_ends(self) -> bool:
        """Whether the last step of this stage is taken, and another stage follows."""
        return self.state.step == self.last_step < self.steps

    @property
    def preempted(self) -> bool:
        """Whether a signal or an interrupt stops the run."""
        return self.interruption.stop.agreed

    def step(self) -> bool:
        """Take one optimizer step unless the data has ended or a rank received a stop request; return whether to continue.

        Raises:
            UserError: the data of a rank is invalid. Raised on every rank.
        """
        number = self.state.step + 1
        self.lifecycle.step_start(number)
        with self.spent.on("data"):
            totals = self.lookahead.take()
        if totals.data_ended or self.preempted:
            self.lifecycle.step_cancelled(number)
            return False
        if totals.weight == 0:
            why = "the next global batch has no target: no token is followed by another of its document"
            raise UserError.one("the training data", why, "add longer documents, or set data.document_mask = false")
        data = self.loader.peek()
        assert data is not None
        try:
            report = self._train_step(data, totals)
        except StepAbandoned:
            self.state.optimizer.zero_grad()
            self.lifecycle.step_cancelled(number)
            return True
        self.last_report = report
        self.lifecycle.step_end(report)
        if self.prepare_restart is not None:
            return False
        self.save(last=number == self.last_step)
        self.validate()
        return True

    def save(self, last: bool = False) -> None:
        """Save a checkpoint if one is due or requested, or the next stage starts from it."""
        requested = self.interruption.save.take()
        last, requested = last and not self.stage_ends, requested or self.stage_ends
        if self.checkpoints is not None:
            with phase("saving a checkpoint"), self._saving():
                self.checkpoints.after_step(last=last, requested=requested)
        elif requested and self.world.rank == 0:
            log.warning(
                "SIGUSR1 requested a checkpoint, but this job does not save checkpoints: set checkpoint.enable = true"
            )

    def validate(self, last: bool = False) -> None:
        """Measure the validation loss if that is due. A checkpoint that is due has been saved before."""
        if self.validation is None or self.preempted or not self.validation.is_due(self.state.step, last):
            return
        self.last_validation = self._validate() or self.last_validation

    def _validate(self, name: str = "") -> ValidationReport | None:
        """See :attr:`titan_core.api.Run.validate`."""
        with self.spent.on("evaluation"):
            reports = [] if self.validation is None else self.validation.measure(self.state.step, name)
        for report in reports:
            self.lifecycle.validation_end(report)
        return reports[0] if reports else None

    def close(self) -> None:
        """Stop reading ahead, finish pending writes and close all files."""
        with phase("finishing pending writes"), ExitStack() as stack:
            stack.callback(self.loader.close)
            if self.checkpoints is not None:
                stack.callback(self.checkpoints.close)
            stack.callback(self.events.close)

    def _train_step(self, data: StepData, totals: StepTotals) -> StepReport:
        """Forward, backward, clip and update."""
        state, device, training = self.state, self.world.device, self.training
        auxiliary = AuxiliaryLosses(self.world.plan.diverging_replicas / self.job.batch.tokens_per_step)
        counted = self.statistic_sums.begin()
        inputs = StepInput(
            [batch.to(device) for batch in data.microbatches],
            step=state.step + 1,
            seed=training.seed,
            # A diverging replica may have no target in a step: its gradients are then 0, not 0 / 0.
            target_weight=totals.replica_weight or 1.0,
            auxiliary=auxiliary,
            metrics=(sums := MetricSums()),
            statistics=counted,
        )
        with self.stopwatch.measure("forward_backward"):
            share = require_scalar(self.run_step(inputs), self.run_alone)
            losses = self.loss_sums(share, auxiliary, totals, data.target_weight)
            metrics = self.metric_means(sums)
            statistics = self.statistic_sums(counted)
        self.loader.next_step()  # only now, because a step that is abandoned leaves the position in the data unchanged
        if state.step + 1 < self.last_step:
            with self.spent.on("data"):
                self.lookahead.begin(self.updates.last_skipped)
        self.lifecycle.gradients_complete(state.step + 1)
        with self.stopwatch.measure("optimizer"):
            gradients = local_gradients(self.parameters)
            grad_norm = global_norm(gradients, self.world)
        lr = self._learning_rate()
        repeated = self.run_step, inputs, state.parts
        repeat = partial(repeat_forward, *repeated), partial(repeat_backward, *repeated)
        pending = PendingUpdate(state.step + 1, losses.mean, losses.of_ranks, grad_norm, inputs.batches, *repeat)
        skipped = self.updates.decidable(self.lifecycle.before_update(pending))
        if skipped is not True:
            self.missing_gradients.check(state.step + 1)  # only now, because observers may have dropped gradients
            if self.checkpoints is not None:
                with self._saving():
                    self.checkpoints.before_update()
        with self.stopwatch.measure("optimizer"):
            if skipped is not True and training.max_norm > 0:
                clip_gradients(gradients, grad_norm, training.max_norm)
            self.updates.take(skipped)
            advance(state.lr_scheduler, updated=skipped is not True)
            state.optimizer.zero_grad()
        state.step += 1
        state.tokens_seen += totals.num_targets
        for dataset, count in zip(self.job.data.datasets, totals.by_dataset, strict=True):
            state.tokens_by_dataset[dataset.name] = state.tokens_by_dataset.get(dataset.name, 0) + count
        return StepReport(
            step=state.step,
            loss=losses.mean,
            rank_losses=losses.of_ranks,
            grad_norm=grad_norm,
            lr=lr,
            num_targets=totals.num_targets,
            epoch=data.epoch,
            data_seconds=totals.data_seconds,
            corrupt=totals.corrupt,
            empty=totals.empty,
            auxiliary=losses.auxiliary,
            metrics=metrics,
            statistics=statistics,
            skipped=skipped,
            logged=state.step in (1, self.steps) or state.step % self.job.config.section(MetricsSection).log_freq == 0,
        )

    def _restored(self, store: CheckpointStore) -> bool:
        """Return whether there is a checkpoint, which is restored. Without one, the run starts from other weights.

        Raises:
            PluginFailure: the store does not say.
        """
        restored = store.restore()
        if not isinstance(restored, bool):
            assert self.job.checkpoint is not None
            why = f"restore returned {shown(restored)}; it must return True or False"
            raise self.job.registry.origin(self.job.checkpoint).failure(why)
        return restored

    def _learning_rate(self) -> float:
        """Return the learning rate of the first group.

        Raises:
            PluginFailure: the schedule has set one that is negative or not finite.
        """
        rates = [float(group["lr"]) for group in self.state.optimizer.param_groups]
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise self.job.registry.origin(self.job.lr_schedule).failure(f"set the learning rates {rates}")
        return rates[0]

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Count the time as that of checkpoints."""
        with self.spent.on("save"), self.stopwatch.measure("checkpoint", on_host=True):
            yield

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """See :attr:`titan_core.api.Run.evaluation`."""
        started = time.perf_counter()
        with self.spent.on("evaluation"), evaluation(self.state.parts):
            yield
        self.metrics.exclude(time.perf_counter() - started)

    def _restart(self, prepare: Callable[[], None]) -> None:
        """See :attr:`titan_core.api.Run.restart`."""
        self.prepare_restart = prepare

    def _compute(self, batches: Sequence[Batch], objective: ObjectiveFunction) -> None:
        """See :attr:`titan_core.api.Run.compute`."""
        with other_objective(self.state.parts, objective):
            self.run_alone.evaluate(StepInput(batches, self.state.step, self.training.seed))
