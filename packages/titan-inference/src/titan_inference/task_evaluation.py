"""Tasks of lm-eval on the way: on the model while it trains, on the mesh that trains it."""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
from lm_eval.evaluator import simple_evaluate

from titan_core.api import JobContext, Run, RunEnd, UserError, hookimpl
from titan_core.toolkit.simulation import current_simulation
from titan_core.toolkit.status import phase
from titan_inference.answers_in_training import AnswersInTraining
from titan_inference.config import EvaluationSection
from titan_inference.lm_eval_model import TitanLM
from titan_inference.tasks import scores_in, tasks_of

log = logging.getLogger(__name__)


class TaskEvaluation:
    """Runs tasks before the first step, at intervals and at the end. The time does not count as training time, and the
    training that follows is the same to the bit. Only rank 0 reads the data of the tasks."""

    def __init__(self, context: JobContext[EvaluationSection]) -> None:
        self._section, self._config = context.section, context.job.config
        self._run: Run | None = None
        self._evaluated: int | None = None

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Load the tasks, and run them if this is the start of training.

        Raises:
            UserError: lm-eval has no task of a name; on every rank.
        """
        if current_simulation() is not None:
            return  # its tensors have no values
        self._answers, self._run = AnswersInTraining(run), run
        section, mistake = self._section, None
        if run.world.rank == 0:
            names = dict.fromkeys([*section.tasks, *section.final_tasks])
            try:
                with phase("looking the tasks up"):
                    self._manager = tasks_of(names, section.include_path, self._where, "evaluation.include_path")
            except UserError as error:
                mistake = error
        run.world.raise_together(mistake)
        if run.step == 0:
            self._evaluate(0, section.tasks, section.limit)

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        """Run the tasks if that was due after the last step. By now it is logged, and its checkpoint is saved."""
        last, run, section = step - 1, self._run, self._section
        if run is not None and section.freq and last > run.step and last % section.freq == 0:
            self._evaluate(last, section.tasks, section.limit)

    @hookimpl(tryfirst=True)
    def titan_train_end(self, end: RunEnd) -> None:
        """Run the final tasks, if the run has trained all that it was to train."""
        if self._run is None or end.failed or not (end.completed or end.data_ended):
            return
        if self._section.final_tasks:
            self._evaluate(end.step, self._section.final_tasks, None)
        elif self._evaluated != end.step:
            self._evaluate(end.step, self._section.tasks, self._section.limit)

    def _where(self, task: str) -> str:
        return self._config.where("evaluation.tasks", task)

    def _evaluate(self, step: int, names: Sequence[str], limit: int | None) -> None:
        run = self._run
        if run is None or not names:
            return
        self._evaluated = step
        # Python's and torch's generators are restored by evaluation(); lm-eval seeds numpy's, too.
        numbers = numpy.random.get_state()
        try:
            with run.evaluation(), phase("running the tasks"):
                if run.world.rank > 0:
                    self._answers.serve()
                    return
                try:
                    for name in names:
                        self._report(step, name, self._scores(step, name, limit))
                finally:
                    if not self._answers.failed:  # otherwise the other ranks have failed, too
                        self._answers.end()
        finally:
            numpy.random.set_state(numbers)

    def _scores(self, step: int, name: str, limit: int | None) -> Mapping[str, float]:
        """Return the metrics of a task; none if it fails, which does not end the run."""
        run, section = self._run, self._section
        assert run is not None
        model = TitanLM(self._answers, run.job.text_tokenizer, run.job.batch.global_size)
        try:
            with _quiet():
                results: Any = simple_evaluate(
                    model=model, tasks=[name], task_manager=self._manager, num_fewshot=section.num_fewshot, limit=limit,
                    log_samples=False,
                )  # fmt: skip
        except Exception as error:  # lm-eval and the code of a task raise anything
            if self._answers.failed:
                raise  # not the task's fault, and the other ranks have failed, too
            self._gave_up(name, error, step)
            return {}
        return scores_in(results)

    def _report(self, step: int, task: str, scores: Mapping[str, float]) -> None:
        run = self._run
        if run is None or not scores:
            return
        run.log(
            {"step": step, **{f"evaluation/{task}/{name}": value for name, value in scores.items()}, "time": time.time()}
        )

    def _gave_up(self, name: str, error: Exception, step: int) -> None:
        """Say in one line that a task has failed, and that training continues."""
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("step %d: evaluation task %r failed, and training continues without it: %s", step, name, what[:300])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars and the messages of lm-eval."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
