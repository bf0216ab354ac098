"""Mistakes in the parallelisms."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

MESH = "tests/integration/test_oracle.py::test_a_run_on_a_mesh_is_that_of_plain_torch"
PLAN = "tests/parallel/test_pipeline_plan.py"
OFFLOADED = "tests/parallel/test_activation_offload.py"
RECOMPUTED = "tests/parallel/test_activation_checkpoint.py"
TIED = "tests/parallel/test_equivalence.py::TestTied"
NORMS = "tests/parallel/test_layout_division.py"
PARTS = "tests/parallel/test_attention.py"

CP, RING = "parallel/context_parallel.py", "parallel/ring_attention.py"
EXCHANGE, WINDOWS = "parallel/head_exchange.py", "parallel/window_attention.py"
OFFLOAD = "parallel/activation_offload.py"
GRAPHS, REPEATED, COUNTED = (
    "parallel/cuda_graphs.py",
    "tests/parallel/test_cuda_graphs.py",
    "tests/integration/test_cuda_graphs.py",
)

MUTANTS = (
    Mutant("heads-without-tails", CP, "chunks[-1 - self._rank]", "chunks[2 * self._rank + 1]", (PARTS,)),
    Mutant("chunks-out-of-order", "core/api/model/sequence_share.py", "pieces[held.index(chunk)]", "pieces[chunk]", (PARTS,)),
    Mutant("heads-see-later-ranks", RING, "else (back, _WHOLE)", "else (_WHOLE, _WHOLE)", (PARTS,)),
    Mutant("own-keys-are-an-earlier-ranks", RING, "if step <= rank else", "if step < rank else", (PARTS,)),
    Mutant("back-chunks-in-order", EXCHANGE, "chunks = (front, back.flip(0))", "chunks = (front, back)", (PARTS,)),
    Mutant("key-heads-of-other-ranks", EXCHANGE, "tensor.repeat_interleave(times, dim)", "torch.cat([tensor] * times, dim)", (PARTS,)),
    Mutant("exchanged-heads-detached", EXCHANGE, "return all_to_all(gradient.contiguous(), ctx.group), None", "return gradient, None", (PARTS,)),
    Mutant("sinks-not-in-the-logsumexp", RING, "        logsumexp = torch.logaddexp(logsumexp, sink)\n", "", (PARTS,)),
    Mutant("windows-one-too-short", WINDOWS, "mine * length - window + 1), mine * length", "mine * length - window + 2), mine * length", (PARTS,)),
    Mutant("windows-of-the-own-chunk", WINDOWS, "first = max(0, own * length - window + 1)", "first = own * length", (PARTS,)),
    Mutant("documents-of-other-positions", WINDOWS, "documents[:, first : first + keys.shape[2]]", "documents[:, : keys.shape[2]]", (PARTS,)),
    Mutant("halo-gradients-stay", WINDOWS, "return exchange_rows(gradient.contiguous(), ctx.sent, ctx.received, ctx.group)", "return gradient.new_zeros(sum(ctx.sent), *gradient.shape[1:])", (PARTS,)),
    Mutant("masks-of-a-ranks-own-positions", "core/api/parallel/model_part.py", "make_document_mask(attention, self.attention_masks)", "make_document_mask(attention)",
           ("tests/parallel/test_documents_and_validation.py",)),
    Mutant("masks-of-chunks-shifted", "parallel/context_parallel.py", "documents[:, first : (own + 1) * positions]", "documents[:, : (own + 1) * positions - first]",
           ("tests/parallel/test_documents_and_validation.py",)),
    Mutant("steps-not-weighted", RING, "torch.logaddexp(logsumexp, scores)", "torch.maximum(logsumexp, scores)", (PARTS,)),
    Mutant("own-gradients-alone", RING, "self._next, self._work = _pass_on(sums, self._ranks)", "pass", (PARTS,)),
    Mutant("gradients-of-keys-averaged", "core/api/model/sequence_share.py", "grad_placements=[Partial()]", "grad_placements=[Replicate()]", (PARTS,)),
    Mutant("fsdp-averages", "parallel/fsdp.py", "    _sum_gradients(part.module)\n", "", (MESH + "[FSDP]",)),
    Mutant("pipeline-scales-gradients", "parallel/pipeline.py", '"scale_grads": False', '"scale_grads": True', (MESH + "[PP]",)),
    Mutant("stages-return-views", "parallel/torch_private.py", "output.clone() if isinstance(output, Tensor) and output._base is not None else output", "output", ("tests/parallel/test_stage_outputs.py",)),
    Mutant("loss-of-documents-on-every-rank", "parallel/context_parallel.py", " / self._ranks", "", ("tests/integration/test_example_suites.py::TestDPO::test_mesh",)),
    Mutant("pipeline-loss-not-divided", "parallel/pipeline.py", "microbatch.batch) / self._target_weight", "microbatch.batch)", (MESH + "[PP]",)),
    Mutant("tied-gradients-of-the-first-stage", "parallel/pipeline.py", "        self._ties.add_gradients()\n", "", (TIED,)),
    Mutant("tied-gradients-counted-twice", "parallel/tied_stages.py", "target.add_(source) if add", "target.add_(source, alpha=2) if add", (TIED,)),
    Mutant("tied-weights-of-the-first-step", "parallel/pipeline.py", "        self._ties.copy_weights()\n        self._schedule.step(", "        self._schedule.step(", (TIED,)),
    Mutant("copies-are-trained", "core/api/parallel/model_part.py", " if name not in self.copies)", ")", (TIED,)),
    Mutant("norms-of-own-features", "parallel/norms.py", "sum_over_ranks(x.sum(-1, keepdim=True), ranks) / features", "x.mean(-1, keepdim=True)", (NORMS,)),
    Mutant("gradients-of-norms-of-own-features", "parallel/region_collectives.py", "return all_reduce(gradient.contiguous(), ctx.group), None\n\n\nclass _ScaledGradient", "return gradient, None\n\n\nclass _ScaledGradient", (NORMS,)),
    Mutant("norms-round-later", "parallel/norms.py", "return min(fitting, key=lambda norm: rounded[norm])", "return fitting[0]", ("tests/parallel/test_norms.py",)),
    Mutant("whole-regions-keep-the-first-positions", "parallel/region_collectives.py", "narrow(_POSITIONS, self.ranks.rank * share, share).clone()", "narrow(_POSITIONS, 0, share).clone()", (NORMS,)),
    Mutant("recomputation-draws-anew", "parallel/activation_checkpoint.py", "use_reentrant=False, **chosen", "use_reentrant=False, preserve_rng_state=False, **chosen",
           ("tests/integration/test_dropout_and_buffers.py::test_recomputation_draws_the_same_again",)),
    Mutant("every-stage-of-one-rank-more", "parallel/pipeline_plan.py", "laps = -(-stages // ranks)", "laps = stages // ranks", (PLAN,),
           equivalent="pipeline_check accepts only multiples of the ranks"),
    Mutant("v-schedules-loop", "parallel/pipeline_plan.py", 'if order == "v" and lap % 2 else', 'if order == "v" and lap % 3 else', (PLAN,),
           equivalent="V schedules have two stages per rank, so only laps 0 and 1 exist"),
    Mutant("microbatches-of-the-local-batch", "parallel/pipeline_plan.py", "batch.microbatches * batch.local_size //", "batch.local_size //", (PLAN,)),
    Mutant("head-weighs-nothing", "parallel/pipeline_plan.py", "    weights[-1] += last\n", "", (PLAN,)),
    Mutant("every-nth-block-from-the-last", "parallel/activation_checkpoint.py", "elif number % int(section.selective_ac_option) == 0:", "elif (number + 1) % int(section.selective_ac_option) == 0:", (RECOMPUTED,)),
    Mutant("every-second-block-whatever-n", "parallel/activation_checkpoint.py", "elif number % int(section.selective_ac_option) == 0:", "elif number % 2 == 0:", (RECOMPUTED,)),
    Mutant("the-first-matmul-kept", "parallel/activation_checkpoint.py", "keep = keep or matmuls % 2 == 1", "keep = keep or matmuls % 2 == 0", (RECOMPUTED,)),
    Mutant("offloaded-from-the-last-block", OFFLOAD, "math.ceil(share * max(0, blocks - 1))", "math.ceil(share * blocks)", (OFFLOADED,)),
    Mutant("offloaded-blocks-fetched-when-needed", OFFLOAD, "                self._before.fetch()\n", "                pass\n", (OFFLOADED,)),
    Mutant("kept-blocks-wait-for-offloaded-ones", OFFLOAD, "            if self._is_sent:\n", "            if True:\n", (OFFLOADED,)),
    Mutant("offloaded-memory-freed-before-it-is-copied", OFFLOAD, "            self.host.wait_for(event)\n", "", (OFFLOADED,)),
    Mutant("fetched-memory-used-at-once", OFFLOAD, "                self._offload.host.arrive()\n", "", (OFFLOADED,)),
    Mutant("parameters-offloaded", OFFLOAD, "(key := id(storage)) in stay or ", "(key := id(storage)) in () or ", (OFFLOADED,)),
    Mutant("changes-while-copying-unnoticed", OFFLOAD, "self._was_changed = self.is_changed", "self._was_changed = False", (OFFLOADED,)),
    Mutant("buffers-lost", "parallel/host_memory.py", "        self._free[buffer.numel()].append(buffer)\n", "        pass\n", (OFFLOADED,)),
    Mutant("selective-results-not-offloaded", "parallel/split_backward_contexts.py", "if self._tensor is not None and not self.is_changed:", "if False:", (OFFLOADED,)),
    Mutant("frozen-first-stages-end-the-graph", "parallel/pipeline.py", "module.register_forward_hook(_require_grad)", "pass", ("tests/integration/test_freeze.py::test_training_on_a_mesh_is_that_on_one_device",)),
    Mutant("graphs-of-one-batch", GRAPHS, "            static.copy_(tensor)\n", "            pass\n", (REPEATED,)),
    Mutant("graphs-divide-by-one-weight", GRAPHS, "self._weight.fill_(inputs.target_weight)", "self._weight.fill_(124.0)", (REPEATED,)),
    Mutant("graphs-draw-the-same", GRAPHS, "        self._key.fill_(key_of_step(inputs.seed, inputs.step))\n", "", (REPEATED,)),
    Mutant("graphs-count-on", GRAPHS, "        self._statistics.counts.zero_()\n", "", (COUNTED,)),
    Mutant("graphs-lose-auxiliary-losses", GRAPHS, "        inputs.auxiliary.values.update(self._auxiliary.values)\n", "", (COUNTED,)),
    Mutant("graphs-repeat-into-gradients", GRAPHS, "if repeated or any(", "if any(", (REPEATED,)),
    Mutant("graphs-overwrite-gradients", GRAPHS, "if repeated or any(parameter.grad is not None for parameter in self._parameters):", "if repeated:", (REPEATED,)),
    Mutant("graphs-of-moved-parameters", GRAPHS, "            if now != before:", "            if False:", (REPEATED,)),
)  # fmt: skip
