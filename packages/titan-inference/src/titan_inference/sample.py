"""Samples of what the model writes during a run, from the live model and on the mesh that trains it."""

from __future__ import annotations

import logging
import math
from functools import partial

from titan_core.api import Job, JobContext, Problem, Run, RunEnd, UserError, hookimpl
from titan_core.api.config.sections import TrainingSection
from titan_core.api.observe.events import Sample
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.simulation import current_simulation
from titan_inference.answers import continued
from titan_inference.config import SampleSection
from titan_inference.generation import Generator
from titan_inference.output import Continuation
from titan_inference.prompts import encode_prompt
from titan_inference.sampling import Sampler, SamplingOptions

log = logging.getLogger(__name__)

GRANULE = 16
"""Float8 matmuls want multiples of this many rows."""


class Sampling:
    """Generates with the model as training has divided it. Every rank computes every prompt, because each forward pass needs
    all ranks. Whole sequences are computed for each token: sequence parallelism cannot divide a single position."""

    def __init__(self, context: JobContext[SampleSection]) -> None:
        self._section, self._facts = context.section, context.job
        self._seq_len = context.job.section(TrainingSection).seq_len
        self._prompts: list[list[int]] = []
        self._run: Run | None = None
        self._sampled: int | None = None

    @hookimpl
    def titan_job_assembled(self, job: AssembledJob) -> None:
        """Encode the prompts.

        Raises:
            UserError: a prompt encodes to zero tokens, or to more than fit.
        """
        problems: list[Problem] = []
        for number, text in enumerate(self._section.prompts):
            ids = encode_prompt(job.text_tokenizer, text)
            where = job.config.where(f"sample.prompts[{number}]", text)
            if not ids:
                problems.append(Problem(where, "encodes to zero tokens", "choose a longer prompt"))
            elif len(ids) >= self._seq_len:
                why = f"it has {len(ids)} tokens, and training.seq_len = {self._seq_len} leaves no room for a continuation"
                problems.append(Problem(where, why, "shorten the prompt"))
            self._prompts.append(ids)
        if problems:
            raise UserError(*problems)

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Log why there are no samples, if this run cannot generate any."""
        if current_simulation() is not None:
            return  # its tensors have no values
        obstacle = obstacle_to_sampling(self._facts)
        if obstacle is None:
            self._run = run
        elif run.world.rank == 0:
            log.info("no samples during this run: %s; `titan generate` reads its checkpoints", obstacle)

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        """Sample if that was due after the last step. By now it is logged, and its checkpoint is saved."""
        last, run = step - 1, self._run
        if run is not None and self._section.freq and last > run.step and last % self._section.freq == 0:
            self._sample(last)

    @hookimpl(tryfirst=True)
    def titan_train_end(self, end: RunEnd) -> None:
        """Sample, unless the run failed or must leave at once."""
        if not (end.failed or end.interrupted or end.preempted or self._sampled == end.step):
            self._sample(end.step)

    def _sample(self, step: int) -> None:
        run, section = self._run, self._section
        if run is None:
            return
        self._sampled = step
        tokenizer, world = run.job.text_tokenizer, run.world
        ends = set(tokenizer.end_ids)
        texts = [Continuation(tokenizer, ends, ()) for _ in self._prompts]
        count = min(section.max_new_tokens, self._seq_len - max(map(len, self._prompts)))
        sampler = Sampler(SamplingOptions(section.temperature, seed=section.seed))
        (part,) = run.parts
        generator = Generator(
            part, world.device, tokenizer.vocab_size, world.broadcast, use_cache=False, padded=partial(padded, run.job)
        )
        with run.evaluation():
            written = continued(generator, self._prompts, sampler, count, texts)
        if world.rank > 0:
            return
        for prompt, text in zip(section.prompts, written, strict=True):
            run.show(Sample(step, prompt, text))


def padded(job: Job, length: int) -> int:
    """Return a number of positions that sequence parallelism can divide: training's, or fewer."""
    granule = GRANULE * math.prod(job.mesh.degrees[dim.name] for dim in job.mesh.dims if dim.divides == "weights")
    return min(-(-length // granule) * granule, job.batch.seq_len)


def obstacle_to_sampling(job: Job) -> str | None:
    """Return why the job's model cannot generate tokens while it trains; ``None`` if it can."""
    for dim in job.mesh.dims:
        if job.mesh.degrees[dim.name] > 1 and dim.divides in ("layers", "sequence"):
            return f"{dim.degree_key} = {job.mesh.degrees[dim.name]} divides {dim.divides}"
    if job.model.layout.inputs:
        return f"the model takes more than tokens ({', '.join(job.model.layout.inputs)})"
    return None
