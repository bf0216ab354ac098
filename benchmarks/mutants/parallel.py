"""Mistakes in the division of models over ranks."""

# ruff: noqa: E501 (a table: one mistake a line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

MESH = "tests/integration/test_oracle.py::test_a_run_on_a_mesh_is_that_of_plain_torch"
PLAN = "tests/parallel/test_pipeline_plan.py"
PARTS = "tests/parallel/test_loss_and_attention.py"

LOSS, CP, GATHERED = "parallel/loss_parallel.py", "parallel/context_parallel.py", "parallel/gathered_attention.py"

MUTANTS = (
    Mutant("vocabulary-offset-of-odd-sizes", LOSS, "-(-vocab_size // dist.get_world_size(group))", "(vocab_size // dist.get_world_size(group))", (PARTS,)),
    Mutant("vocabulary-without-an-offset", LOSS, "targets - first, 0)", "targets, 0)", (PARTS,)),
    Mutant("vocabulary-upper-end-included", LOSS, "targets < first + scores.shape[-1]", "targets <= first + scores.shape[-1]", (PARTS,)),
    Mutant("vocabulary-maximum-summed", LOSS, "dist.ReduceOp.MAX", "dist.ReduceOp.MIN", (PARTS,)),
    Mutant("vocabulary-sums-of-one-rank", LOSS, "        dist.all_reduce(sums, group=group)\n", "", (PARTS,)),
    Mutant("ignored-targets-count", LOSS, "return torch.where(counted, total.log() - picked, 0.0).sum()", "return (total.log() - picked).sum()", (PARTS,)),
    Mutant("ignored-targets-have-gradients", LOSS, "gradient *= (gradients[0] * counted)[:, None]", "gradient *= gradients[0]", (PARTS,)),
    Mutant("gradient-of-every-rank's-column", LOSS, "-mine[:, None].to(gradient.dtype)", "-torch.ones_like(mine)[:, None].to(gradient.dtype)", (PARTS,)),
    Mutant("gradient-of-low-precision", LOSS, "return gradient.to(ctx.dtype)", "return gradient.to(torch.float32)", (PARTS,),
           equivalent="autograd casts the gradient of a custom function to its input's dtype"),
    Mutant("heads-without-tails", CP, "chunks[-1 - self._rank]", "chunks[2 * self._rank + 1]", (PARTS,)),
    Mutant("chunks-out-of-order", GATHERED, "tails.flip(2)", "tails", (PARTS,)),
    Mutant("tails-see-no-keys-of-theirs", GATHERED, "first, end = chunk * length, (chunk + 1) * length", "first, end = chunk * length, chunk * length + 1", (PARTS,)),
    Mutant("mask-of-the-first-chunk", GATHERED, ".tril(first)\n", ".tril(0)\n", (PARTS,)),
    Mutant("gradients-of-keys-averaged", GATHERED, "grad_placements=[Partial()]", "grad_placements=[Replicate()]", (PARTS,)),
    Mutant("fsdp-averages", "parallel/fsdp.py", "    _sum_gradients(part.module)\n", "", (MESH + "[FSDP]",)),
    Mutant("pipeline-scales-gradients", "parallel/pipeline.py", '"scale_grads": False', '"scale_grads": True', (MESH + "[PP]",)),
    Mutant("pipeline-loss-not-divided", "parallel/pipeline.py", "return self._loss(logits, targets) / self._num_targets", "return self._loss(logits, targets)", (MESH + "[PP]",)),
    Mutant("recomputation-draws-anew", "parallel/activation_checkpoint.py", "use_reentrant=False, **options", "use_reentrant=False, preserve_rng_state=False, **options",
           ("tests/integration/test_dropout_and_buffers.py::test_recomputation_draws_the_same_again",)),
    Mutant("every-stage-of-one-rank-more", "parallel/pipeline_plan.py", "laps = -(-stages // ranks)", "laps = stages // ranks", (PLAN,)),
    Mutant("v-schedules-loop", "parallel/pipeline_plan.py", 'if order == "v" and lap % 2 else', 'if order == "v" and lap % 3 else', (PLAN,),
           equivalent="V schedules have two stages a rank, so there are laps 0 and 1 alone"),
    Mutant("microbatches-of-the-local-batch", "parallel/pipeline_plan.py", "batch.microbatches * batch.local_size //", "batch.local_size //", (PLAN,)),
    Mutant("head-weighs-nothing", "parallel/pipeline_plan.py", "    weights[-1] += last\n", "", (PLAN,)),
)  # fmt: skip
