"""Mistakes in replica groups."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

GRADIENTS, STATE, STEPS, FAILURES, ADDRESS, TRANSPORT = (
    "tests/ft/test_gradients.py",
    "tests/ft/test_step_parts.py",
    "tests/ft/test_step_parts.py",
    "tests/ft/test_group_failures.py",
    "tests/ft/test_address.py",
    "tests/ft/test_state_transport.py",
)

MUTANTS = (
    Mutant("shares-overlap", "ft/step.py", "range(microbatches * rank // participants, microbatches", "range(microbatches * rank // participants - (rank > 0), microbatches", (GRADIENTS,)),
    Mutant("shares-lose-the-rest", "ft/step.py", "microbatches * (rank + 1) // participants)", "microbatches // participants * (rank + 1))", (GRADIENTS,)),
    Mutant("generators-of-one-group", "ft/step.py", "{inputs.seed}:{inputs.step}:{mine.start}:{run.world.data_rank}", "{inputs.seed}:{inputs.step}:{run.world.data_rank}", (STEPS,)),
    Mutant("generators-of-one-rank", "ft/step.py", "{inputs.seed}:{inputs.step}:{mine.start}:{run.world.data_rank}", "{inputs.seed}:{inputs.step}:{mine.start}", (STEPS,)),
    Mutant("generators-of-one-step", "ft/step.py", "{inputs.seed}:{inputs.step}:{mine.start}:{run.world.data_rank}", "{inputs.seed}:{mine.start}:{run.world.data_rank}", (STEPS,)),
    Mutant("python-generator-not-seeded", "ft/step.py", "    torch.manual_seed(seed)\n    random.seed(seed)\n", "    torch.manual_seed(seed)\n", (STEPS,)),
    Mutant("warm-up-leaves-gradients", "ft/step.py", "            part.module.zero_grad()\n", "            pass\n", (STEPS,)),
    Mutant("warm-up-draws", "ft/step.py", "        with same_generators():\n            self._runner(replace(inputs, batches=inputs.batches[:1]", "        if True:\n            self._runner(replace(inputs, batches=inputs.batches[:1]", (STEPS,)),
    Mutant("buffers-may-change", "ft/step.py", "if not torch.equal(buffer, before[name]):", "if False:", (STEPS, GRADIENTS)),
    Mutant("losses-of-one-group", "ft/gradients.py", "    return header[2].to(loss.dtype)\n", "    return loss\n", (GRADIENTS,)),
    Mutant("unused-gradients-are-zeros", "ft/gradients.py", "        if not groups_with:\n            parameter.grad = None\n", "        if not groups_with:\n            pass\n", (GRADIENTS,)),
    Mutant("another-job-is-accepted", "ft/gradients.py", "    if digest != first:\n", "    if False:\n", (GRADIENTS,)),
    Mutant("others-accept-another-job", "ft/gradients.py", "if all_groups != digest * groups.participants:", "if False:", (GRADIENTS,)),
    Mutant("auxiliary-losses-of-one-group", "ft/gradients.py", "auxiliary.values[name] = header[3 + number].to(loss.dtype)", "pass", (GRADIENTS,)),
    Mutant("statistics-of-one-group", "ft/gradients.py", "groups.sum(statistics.counts)  #", "pass  #", (GRADIENTS,)),
    Mutant("statistics-of-the-warm-up", "ft/step.py", "metrics=None, statistics=None))", "metrics=None))", ("tests/ft/test_shared_steps.py::test_the_microbatch_that_warms_up_does_not_count",)),
    Mutant("one-gradient-a-bucket", "ft/gradients.py", "            if size >= BUCKET_BYTES:\n", "            if size > 0:\n", (GRADIENTS,),
           equivalent="only slower: the sums are the same"),
    Mutant("types-mixed-in-a-bucket", "ft/gradients.py", "alike[gradient.dtype, gradient.device]", "alike[torch.float32, gradient.device]", (GRADIENTS,)),
    Mutant("schedule-not-copied", "ft/run_state.py", '    state.lr_scheduler.load_state_dict(received["lr_scheduler"])\n', "", (STATE,)),
    Mutant("tokens-of-datasets-not-copied", "ft/run_state.py", '    state.tokens_by_dataset.update(received["tokens_by_dataset"])\n', "", (STATE,)),
    Mutant("python-generator-not-copied", "ft/run_state.py", '    random.setstate(states["python"])\n', "", (STATE,)),
    Mutant("torch-generator-not-copied", "ft/run_state.py", '    torch.set_rng_state(states["cpu"])\n', "", (STATE,)),
    Mutant("observers-not-copied", "ft/run_state.py", '    run.observers.restore_state(received["observers"])\n', "", (STATE,)),
    Mutant("any-state-can-be-sent", "ft/run_state.py", "torch.load(file, weights_only=True)", "torch.load(file, weights_only=False)", ("tests/ft/test_run_state.py",)),
    Mutant("buffers-not-copied", "ft/run_state.py", "        found |= {f\"model.{name}\": buffer for name, buffer in persistent_buffers(part).items()}\n", "", (STATE,)),
)  # fmt: skip
