"""Mistakes in the trainer, the optimizer, job assembly and model building."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

ORACLE = "tests/integration/test_oracle.py::test_a_run_is_that_of_plain_torch"
SKIPPED = "tests/integration/test_oracle.py::test_a_skipped_step_leaves_out_its_update_and_nothing_else"
VALIDATED = "tests/integration/test_oracle.py::test_validation_is_that_of_plain_torch"
MESH = "tests/integration/test_oracle.py::test_a_run_on_a_mesh_is_that_of_plain_torch"
NOISY = "tests/integration/test_dropout_and_buffers.py"
PARTS = "tests/core/test_train_parts.py"
DIVIDED, HEAD, AUXILIARY = (
    "tests/core/test_vocabulary.py",
    "tests/core/test_loss_head.py",
    "tests/core/test_auxiliary_loss.py",
)
STATISTIC = "tests/core/test_statistic.py"
SPENT_PY, SPENT = "core/runlog/time_by_cause.py", "tests/core/test_time_by_cause.py"
VOCABULARY = "core/api/training/vocabulary.py"
VIEWS = "tests/core/test_mesh_views.py"
GRAD_NORM = "tests/core/test_grad_norm.py"
RANKS = "tests/core/test_world.py"
AHEAD = "tests/core/test_lookahead.py"
LATE = "tests/debug/test_numerics.py::test_a_device_skips_the_steps_that_a_host_would"
FINITE = "tests/core/test_finite_guard.py"
MODEL = "tests/core/test_model_parts.py"
OPTIM = "tests/core/test_optim.py"
VALUES = "tests/core/test_random_values.py"
TRAINER = "tests/core/test_trainer.py"

STEP, NORM, TRAIN = "core/api/parallel/step.py", "core/loop/optimizer_step.py", "core/loop/trainer.py"
LOOKAHEAD, WORLD, GUARD = "core/loop/lookahead.py", "core/api/parallel/world.py", "core/loop/finite_guard.py"
ADAM, SCHEDULE, GROUPS = "core/optim/adam.py", "core/optim/lr_schedule.py", "core/api/training/optimizer.py"
ATTENTION, PART = "core/api/model/attention.py", "core/api/parallel/model_part.py"
VARIANTS = "tests/core/test_attention_options.py"
PACKED, VARLEN = "core/api/model/packed_attention.py", "tests/core/test_packed_attention.py"
FREEZE, FREEZE_TESTS = "core/model/freeze.py", "tests/integration/test_freeze.py"
MASK, BLOCKS = "core/api/model/attention_mask.py", "tests/core/test_attention_mask.py"

MOVED, EXPERTS = "nn/experts.py", "tests/nn/test_experts.py"

REPLICAS, PARTED = "core/loop/replicas.py", "tests/core/test_own_sums.py"

MUTANTS = (
    Mutant("a-factor-next-to-1-is-rounding", "core/model/mesh_trial.py", "_ROUNDING = 2e-4", "_ROUNDING = 1e-3", (PARTED,)),
    Mutant("lossy-sums-cannot-be-declared", "core/model/mesh_trial.py", "rounding + sum(one.mesh.tolerance", "rounding + sum(0.0", (PARTED,)),
    Mutant("any-tolerance-accepted", "core/plugins/component_checks.py", "0 <= value < 1", "0 <= value", ("tests/core/test_plugin_registration.py",)),
    Mutant("a-lost-state-is-accepted", "core/model/cached_decoding.py", "if not trial.same(logits, trial.logits[:, piece]):", "if False:", ("tests/core/test_cached_decoding.py",)),
    Mutant("cached-logits-of-the-first-positions-alone", "core/model/cached_decoding.py", "itertools.pairwise(cuts)", "itertools.pairwise(cuts[:2])", ("tests/core/test_cached_decoding.py",)),
    Mutant("replicas-compared-once", REPLICAS, "STEPS = (1, 2, 10, 100)", "STEPS = (1,)", (PARTED,)),
    Mutant("replicas-compared-in-the-first-start-alone", REPLICAS, "report.step - self._run.step in STEPS", "report.step in STEPS", ("tests/ckpt/test_parted_replicas.py",)),
    Mutant("replicas-saved-unseen", REPLICAS, "        if step != self._checked:\n", "        if False:\n", (PARTED,)),
    Mutant("replicas-of-other-shards-compared", REPLICAS, "indices = self._equal(over, keys).nonzero()", "indices = torch.ones_like(keys).nonzero()", (PARTED, "tests/parallel/test_equivalence.py")),
    Mutant("replicas-that-differ-by-little-are-equal", "core/toolkit/checksum.py", "(piece * factors)", "((piece >> 8) * factors)", (PARTED,)),
    Mutant("replicas-differ-on-one-rank-alone", REPLICAS, "dist.ReduceOp.MAX", "dist.ReduceOp.SUM", (PARTED,)),
    Mutant("spent-inner-causes-count-twice", SPENT_PY, "        self._since = now\n        before", "        before", (SPENT,)),
    Mutant("spent-causes-never-end", SPENT_PY, "            self.change(before)", "            pass", (SPENT,)),
    Mutant("spent-waits-behind-a-device", SPENT_PY, "        if excess > 0:", "        if excess < 0:", (SPENT,)),
    Mutant("spent-waits-forgiven-twice", SPENT_PY, '        self._data_before = self._seconds["data"]\n', "", (SPENT,)),
    Mutant("spent-events-without-end", SPENT_PY, "least = max(min(_SHARE * elapsed, _MOST_SECONDS), _LEAST_SHARE * elapsed)", "least = min(_SHARE * elapsed, _MOST_SECONDS)", (SPENT,)),
    Mutant("spent-of-rank-0", "core/runlog/event_log.py", "sums = self._world.sum(torch.tensor([*self._own.values()], dtype=torch.float64)).tolist()", "sums = [*self._own.values()]", (SPENT,)),
    Mutant("spent-at-the-end-of-one-rank", "core/runlog/event_log.py", "self._sums[cause] + size * (now", "self._sums[cause] + (now", (SPENT,)),
    # -- experts
    Mutant("experts-tail-kept", MOVED, "return torch.where(belongs[:, None], rows, 0)", "return rows", (EXPERTS,)),
    Mutant("experts-tail-multiplied", MOVED, "return torch.where(belongs[:, None], rows, 0)", "return rows * belongs[:, None]", (EXPERTS,)),
    Mutant("experts-tail-gradient-kept", MOVED, "grouped_linear(mask_rows(rows, counts), weight", "grouped_linear(rows, weight", (EXPERTS,)),
    Mutant("experts-starts-for-ends", MOVED, "-1), offs=counts.cumsum(0)", "-1), offs=(counts.cumsum(0) - counts)", (EXPERTS,)),
    Mutant("experts-copies-of-the-wrong-token", MOVED, "tokens[order // places.shape[1]]", "tokens[order % tokens.shape[0]]", (EXPERTS,)),
    Mutant("experts-gradient-of-one-copy", MOVED, "gradients[0][places].sum(1)", "gradients[0][places][:, 0]", (EXPERTS,)),
    Mutant("experts-outputs-out-of-order", MOVED, "        return rows[order]\n", "        return rows[order.flip(0)]\n", (EXPERTS,)),
    Mutant("experts-ties-by-the-higher-index", MOVED, "(last - torch.arange(last + 1, device=scores.device))", "torch.arange(last + 1, device=scores.device)", (EXPERTS,)),
    Mutant("experts-two-zeros", MOVED, "(scores + 0.0).view", "scores.view", (EXPERTS,)),
    Mutant("experts-negative-scores-reversed", MOVED, "(bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()", "bits.long()", (EXPERTS,)),
    Mutant("experts-groups-by-their-best", MOVED, "grouped.topk(2, dim=-1)", "grouped.topk(1, dim=-1)", (EXPERTS,)),
    Mutant("experts-groups-ignored", MOVED, "grouped.masked_fill(~allowed[..., None], -torch.inf)", "grouped", (EXPERTS,)),
    # -- what is logged, and what a plugin may leave out
    Mutant("last-step-not-logged", TRAIN, "state.step in (1, self.steps) or", "state.step == 1 or", ("tests/core/test_steps.py::test_observers_know_which_steps_are_logged",)),
    Mutant("a-store-without-its-switch", "core/plugins/component_checks.py", "(component.build is None) != (component.active is None)", "component.build is None and component.active is not None", ("tests/core/test_plugin_registration.py::test_a_format_that_is_only_read_builds_no_store",)),
    # -- clipping and the norm
    Mutant("clipping-off-at-1", TRAIN, "and training.max_norm > 0:", "and training.max_norm > 1:", (ORACLE,)),
    Mutant("clipping-always-on", TRAIN, "and training.max_norm > 0:", "and training.max_norm >= 0:", (TRAINER + "::test_a_norm_limit_of_0_does_not_clip",)),
    Mutant("clipping-scales-up", NORM, ".clamp(max=1.0)", "", (GRAD_NORM + "::test_clipping_scales_down_and_never_up",)),
    Mutant("clipping-never-scales", NORM, ".clamp(max=1.0)", ".clamp(min=1.0)", (GRAD_NORM + "::test_clipping_scales_down_and_never_up",)),
    Mutant("clipping-inverted", NORM, "(max_norm / (norm + 1e-6))", "((norm + 1e-6) / max_norm)", (GRAD_NORM + "::test_clipping_scales_down_and_never_up",)),
    Mutant("clipping-ignores-max-norm", NORM, "(max_norm / (norm + 1e-6))", "(1.0 / (norm + 1e-6))", (ORACLE,)),
    Mutant("clipping-by-a-hundredth-less", NORM, "(norm + 1e-6)", "(norm + 1e-2)", (ORACLE,)),
    Mutant("norm-not-squared", NORM, ".to(total.device) ** 2", ".to(total.device)", (GRAD_NORM + "::test_each_element_counts_once_in_the_norm",)),
    Mutant("norm-squared-in-bf16", NORM, "norm.float().to(total.device) ** 2", "norm.to(total.device) ** 2", (GRAD_NORM + "::test_norms_of_bf16_gradients_are_summed_in_fp32",)),
    Mutant("norm-without-root", NORM, "world.sum_over_replica(total).sqrt()", "world.sum_over_replica(total)", (GRAD_NORM + "::test_each_element_counts_once_in_the_norm",)),
    Mutant("norm-of-one-rank", NORM, "return world.sum_over_replica(total).sqrt()", "return total.sqrt()", (GRAD_NORM + "::test_the_norm_covers_all_groups_and_all_ranks_of_the_replica",)),
    Mutant("norm-of-the-last-kind", NORM, "total += norm", "total = norm", (GRAD_NORM + "::test_the_norm_covers_all_groups_and_all_ranks_of_the_replica",)),
    Mutant("norm-counts-replicas", NORM, " * (pieces / holders)", "", (GRAD_NORM + "::test_each_element_counts_once_in_the_norm",)),
    Mutant("norm-forgets-stages", NORM, "// world.plan.diverging_replicas // stages", "// world.plan.diverging_replicas", (GRAD_NORM + "::test_each_element_counts_once_in_the_norm",)),
    Mutant("norm-forgets-copies", NORM, "// world.plan.diverging_replicas // stages", "// stages", (GRAD_NORM + "::test_the_norm_covers_all_groups_and_all_ranks_of_the_replica",)),
    Mutant("partial-gradients-stay-partial", NORM, "if _is_partial(gradient.placements)", "if False", (GRAD_NORM + "::test_the_norm_of_dtensors_is_that_of_the_whole_gradients",)),
    Mutant("strided-shards-count-as-whole", NORM, "if not placement.is_replicate())", "if placement.is_shard())", (MESH + "[TP]",),
           equivalent="is_shard treats strided shards the same on every mesh used here (torch 2.15); see the comment there"),
    Mutant("redistributed-gradient-dropped", NORM, "parameter.grad = gradient = gradient.redistribute(", "gradient = gradient.redistribute(", (GRAD_NORM + "::test_the_norm_of_dtensors_is_that_of_the_whole_gradients",)),
    # -- the loop
    Mutant("skipped-update-done-anyway", "core/loop/optimizer_step.py", "        if not skip:\n", "        if True:\n", (SKIPPED,)),
    Mutant("the-device-skips-nothing", "core/torch_private.py", "None, skip.float()", "None, 0 * skip.float()", (LATE,)),
    Mutant("the-device-skips-the-good-steps", "core/loop/finite_guard.py", "return ~finite(", "return finite(", (LATE,)),
    Mutant("gradients-kept-after-a-skip", TRAIN, "            state.optimizer.zero_grad()\n", "            if not skipped:\n                state.optimizer.zero_grad()\n", (SKIPPED,)),
    Mutant("gradients-never-zeroed", TRAIN, "            state.optimizer.zero_grad()\n", "", (ORACLE,)),
    Mutant("schedule-stands-still", TRAIN, "            advance(state.lr_scheduler, updated=skipped is not True)\n", "", (ORACLE,)),
    Mutant("schedule-skips-with-the-update", TRAIN, "            advance(state.lr_scheduler, updated=skipped is not True)\n", "            if not skipped:\n                advance(state.lr_scheduler, updated=True)\n", (SKIPPED,)),
    Mutant("reported-rate-of-the-next-step", TRAIN, "            lr=lr,\n", '            lr=float(state.optimizer.param_groups[0]["lr"]),\n', (ORACLE,)),
    Mutant("reported-rate-of-the-last-group", TRAIN, "        return rates[0]\n", "        return rates[-1]\n", (ORACLE,)),
    Mutant("tokens-of-the-copy-seen", TRAIN, "state.tokens_seen += totals.num_targets", "state.tokens_seen = totals.num_targets", (TRAINER + "::test_a_run_from_start_to_end",)),
    Mutant("loss-counted-on-every-tp-rank", "core/loop/losses.py", 'self._first = world.is_first_along("weights")  # the other ranks compute the same losses', "self._first = True", (MESH + "[TP]",)),
    Mutant("metrics-of-recomputed-chunks", "core/api/training/metric.py", "if not torch.is_grad_enabled():", "if True:", ("tests/core/test_metrics.py",)),
    Mutant("values-of-the-next-token", "core/data/batches.py", "numpy.ascontiguousarray(values[:, :-1])", "numpy.ascontiguousarray(values[:, 1:])", ("tests/core/test_extras.py",)),
    Mutant("computed-values-not-compared", "core/model/random_values.py", "if not self._sampled:", "if False:", ("tests/core/test_random_values.py",)),
    Mutant("one-random-number-for-all-calls", "core/model/random_values.py", "calls += 1", "pass", ("tests/core/test_random_values.py",)),
    Mutant("documents-of-one-rank", "core/api/training/batch.py", "return sums if self.sequence_group is None else", "return sums if True else", ("tests/integration/test_example_suites.py::TestDPO::test_mesh",)),
    Mutant("gradient-of-one-ranks-documents", "core/api/training/batch.py", "dist.all_reduce(total, group=ctx.group)", "pass", ("tests/integration/test_example_suites.py::TestDPO::test_mesh",)),
    Mutant("frozen-chunks-joined-anyhow", "core/loop/reference_model.py", "if done == positions:", "if done:", ("tests/core/test_reference_model.py",)),
    Mutant("copy-not-made-before-update", TRAIN, "self.checkpoints.before_update()", "pass", ("tests/ckpt/test_saving.py",)),
    Mutant("stop-at-step-ignored", TRAIN, "self.training.steps if stop is None else min(self.training.steps, stop)", "self.training.steps", ("tests/ckpt/test_saving.py",)),
    Mutant("microbatches-not-divided", STEP, "/ inputs.target_weight", "/ microbatch.batch.target_weights().sum()", (ORACLE,)),
    Mutant("loss-of-the-last-microbatch", STEP, "return torch.stack(losses).sum()", "return losses[-1]", (ORACLE,)),
    Mutant("evaluation-of-the-mean", STEP, "for microbatch in inputs.microbatches()]).sum()", "for microbatch in inputs.microbatches()]).mean()", (PARTS + "::test_microbatches_add_up_to_the_mean_over_the_global_batch",)),
    Mutant("loss-in-low-precision", VOCABULARY, "maximum = logits.amax(-1).float()", "maximum = logits.amax(-1)", (PARTS + "::test_the_loss_is_a_sum_in_fp32_over_what_is_a_target",)),
    Mutant("later-tokens-seen", "core/model/dependences.py", "            if place is not None:\n                of_first", "            if False:\n                of_first", ("tests/parallel/test_layout_damage.py",)),
    Mutant("draws-are-the-same", "core/model/draws.py", "share = draws.ends(result) if draws.other else", "share = ", ("tests/parallel/test_layout_damage.py",)),
    Mutant("unknown-draws-accepted", "core/model/dependences.py", "if draws.unknown:", "if False:", ("tests/parallel/test_layout_damage.py",)),
    Mutant("any-argument-draws", "core/model/dependences.py", "unmade or (unmade is None and", "True or (unmade is None and", ("tests/core/test_randomness.py",)),
    Mutant("flops-of-other-blocks-forgotten", "core/model/counted_flops.py", "if path != first", "if path == first", ("tests/core/test_counted_flops.py",)),
    Mutant("flops-of-short-attention", "core/model/counted_flops.py", "min(length, mixer.window or length)", "min(trial.seq, mixer.window or length)", ("tests/core/test_counted_flops.py",)),
    Mutant("loss-is-a-mean", "core/model/next_token.py", "likelihood, 0.0).sum()", "likelihood, 0.0).mean()", (DIVIDED,)),
    Mutant("weights-of-targets-ignored", "core/model/next_token.py", "likelihood = likelihood * batch.weights", "pass", (DIVIDED,)),
    Mutant("vocabulary-offset-of-odd-sizes", "parallel/tensor_parallel.py", "-(-part.layout.vocab_size // mesh.size())", "part.layout.vocab_size // mesh.size()", (MESH + "[TP]",)),
    Mutant("vocabulary-without-an-offset", VOCABULARY, "torch.where(mine, ids - first, 0)", "torch.where(mine, ids, 0)", (DIVIDED,)),
    Mutant("vocabulary-upper-end-included", VOCABULARY, "(ids < first + columns)", "(ids <= first + columns)", (DIVIDED,)),
    Mutant("vocabulary-maximum-of-one-rank", VOCABULARY, "dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)", "pass", (DIVIDED,)),
    Mutant("vocabulary-sums-of-one-rank", VOCABULARY, "            dist.all_reduce(sums, group=group)\n", "", (DIVIDED,)),
    Mutant("ignored-targets-count", "core/model/next_token.py", "torch.where(batch.targets != IGNORE, likelihood, 0.0)", "likelihood", (DIVIDED,)),
    Mutant("gradient-of-every-rank's-column", VOCABULARY, "torch.where(mine, likelihood_gradient, 0.0)", "likelihood_gradient", (DIVIDED,)),
    Mutant("pieces-of-one-logit", VOCABULARY, "(piece - largest[:, None]).exp_()", "(piece - largest[0]).exp_()", ("tests/core/test_vocabulary.py",)),
    Mutant("piece-of-the-gradient-kept", VOCABULARY, "        del scores  # before the next piece is allocated\n", "", ("tests/core/test_vocabulary.py",)),
    Mutant("chunks-of-one-batch", "core/model/loss_head.py", "tensor[:, first : first + length]", "tensor[:, :length]", (HEAD,)),
    Mutant("chunks-kept", "core/model/loss_head.py", "checkpoint(loss_of_chunk, *call, use_reentrant=False)", "loss_of_chunk(*call)", (HEAD,)),
    Mutant("chunks-always-recomputed", "core/model/loss_head.py", "if pending is None or not pending.of:", "if False:", (HEAD,)),
    Mutant("gradients-of-every-microbatch-kept", "core/model/loss_head.py", "self._pending = weakref.ref(found)", "pass", (HEAD,)),
    Mutant("gradients-of-the-head-only", "core/model/loss_gradients.py", "if not losses and not _depends_only_on(loss, [leaf, *parameters]):", "if False:", (HEAD,)),
    Mutant("gradient-of-two-parameters-added-twice", "core/model/loss_gradients.py", "gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)", "gradient.to(dtype)", (HEAD,)),
    Mutant("gradients-unscaled", "core/model/loss_gradients.py", "torch.ones_like(loss.detach()) / divisor", "torch.ones_like(loss.detach())", (HEAD,)),
    Mutant("gradients-not-rescaled", "core/model/loss_gradients.py", "outer[0] / gradients.scale", "outer[0] / outer[0]", (HEAD,)),
    Mutant("gradients-of-the-last-chunk", "core/model/loss_gradients.py", "self.value.add_(gradient)", "self.value = gradient", (HEAD,)),
    Mutant("auxiliary-losses-of-each-microbatch", "core/api/model/auxiliary_loss.py", "ctx.losses.scale * ctx.share", "ctx.share", (AUXILIARY,)),
    # -- step statistics
    Mutant("statistics-of-each-backward-pass", "core/api/model/statistic.py", "            self._pending = None\n", "", (STATISTIC,)),
    Mutant("statistics-counted-in-forward", "core/api/model/statistic.py", "    carrier.register_hook(_Once(microbatch.statistics, name, place, values.detach(), divided))\n", "    microbatch.statistics.add(name, place, values, divided)\n", (STATISTIC,)),
    Mutant("statistics-of-all-tensor-parallel-ranks", "core/api/parallel/microbatch.py", "if divided or self._first:", "if True:", (STATISTIC,)),
    Mutant("statistics-of-one-share-of-positions", "core/api/parallel/microbatch.py", "if divided or self._first:", "if self._first:", (STATISTIC,)),
    Mutant("statistics-of-shape-inference", "core/api/model/statistic.py", " or is_shape_inference()", "", (STATISTIC,)),
    Mutant("statistics-of-repeated-steps", "core/model/preserved.py", "auxiliary=auxiliary, metrics=None, statistics=None)", "auxiliary=auxiliary, metrics=None)", (STATISTIC,)),
    Mutant("statistics-in-floating-point", "core/api/parallel/microbatch.py", "torch.zeros(sum(sizes), dtype=torch.int64", "torch.zeros(sum(sizes), dtype=torch.float64", (STATISTIC,)),
    Mutant("statistics-of-one-rank", "core/loop/losses.py", "            self._world.sum(counted.counts)\n", "            pass\n", (STATISTIC,)),
    Mutant("statistics-without-a-gradient", "core/api/model/statistic.py", "    if not carrier.requires_grad:\n", "    if False:\n", (STATISTIC,)),
    Mutant("statistics-of-different-shapes", "core/loop/losses.py", "            if name in self._shapes:\n", "            if False:\n", (STATISTIC,)),
    # -- seeds
    Mutant("one-seed-for-all-ranks", "core/loop/process_settings.py", "* 1_000_003 + world.data_rank", "* 1_000_003", (PARTS + "::test_seeds_differ_by_seed_and_by_what_a_rank_sees",)),
    Mutant("a-seed-for-each-rank", "core/loop/process_settings.py", "+ world.data_rank", "+ world.rank", (PARTS + "::test_seeds_differ_by_seed_and_by_what_a_rank_sees",)),
    Mutant("seed-ignored", "core/loop/process_settings.py", "(training.seed * 1_000_003", "(0 * 1_000_003", (PARTS + "::test_seeds_differ_by_seed_and_by_what_a_rank_sees",)),
    Mutant("python-not-seeded", "core/loop/process_settings.py", "    random.seed(seed)\n", "", (PARTS + "::test_seeds_differ_by_seed_and_by_what_a_rank_sees",)),
    Mutant("not-deterministic", "core/loop/process_settings.py", "torch.use_deterministic_algorithms(True)", "torch.use_deterministic_algorithms(False)", (PARTS + "::test_numerics_are_set_as_the_config_says",)),
    # -- what ranks agree on
    Mutant("targets-counted-per-tp-rank", LOOKAHEAD, 'world.is_first_along("layers", "sequence", "weights")', 'world.is_first_along("layers", "sequence")', (AHEAD + "::test_ranks_that_see_the_same_tokens_count_them_once",)),
    Mutant("targets-counted-per-cp-rank", LOOKAHEAD, 'world.is_first_along("layers", "sequence", "weights")', 'world.is_first_along("layers", "weights")', (AHEAD + "::test_ranks_that_see_the_same_tokens_count_them_once",)),
    Mutant("an-end-elsewhere-goes-unheard", LOOKAHEAD, "ended > 0, exchange.data_seconds", "False, exchange.data_seconds", (AHEAD + "::test_the_end_of_one_ranks_data_ends_all",)),
    Mutant("a-request-of-one-alone-unheard", LOOKAHEAD, "request.agree(sent_here, ranks > 0)", "request.agree(sent_here, sent_here)", (AHEAD + "::test_requests_travel_with_the_totals",)),
    Mutant("counts-in-fp32", LOOKAHEAD, "*unused, *targets, weight], dtype=torch.float64)", "*unused, *targets, weight], dtype=torch.float32)", (AHEAD + "::test_counts_of_any_size_are_exact",)),
    Mutant("exponentials-in-bf16", VOCABULARY, "logits.amax(-1).float()", "logits.amax(-1)", (DIVIDED,)),
    Mutant("a-request-needs-two-ranks", LOOKAHEAD, "request.agree(sent_here, ranks > 0)", "request.agree(sent_here, ranks > 1)", (AHEAD + "::test_requests_travel_with_the_totals",)),
    Mutant("a-mistake-elsewhere-unheard", LOOKAHEAD, "        if mistakes:\n", "        if exchange.mistake:\n", ("tests/parallel/test_equivalence.py::test_a_bad_record_on_one_rank_is_the_same_clear_error_on_all",)),
    Mutant("a-request-made-again", "core/api/observe/shared_request.py", "            self.pending = False\n", "            pass\n", (AHEAD + "::test_a_request_is_taken_once_and_may_be_made_again_meanwhile",)),
    Mutant("a-request-forgotten", "core/api/observe/shared_request.py", "self.agreed = self.agreed or anywhere", "self.agreed = anywhere", (AHEAD + "::test_a_request_is_taken_once_and_may_be_made_again_meanwhile",)),
    Mutant("other-plugin-versions-accepted", "core/api/plugins/assembled_job.py", "plugin[\"version\"] for plugin in self.plugin_versions()", "\"\" for plugin in self.plugin_versions()", (RANKS + "::test_ranks_with_different_plugin_versions_are_refused", RANKS + "::test_a_jobs_identity_depends_on_every_plugin_version")),
    Mutant("other-configs-accepted", "core/loop/world.py", "if digest != digests[0]]", "if digest is None]", (RANKS + "::test_ranks_with_different_plugin_versions_are_refused",)),
    Mutant("data-rank-by-the-wrong-stride", WORLD, "index = index * self.plan.degrees[dim.name] + self.coordinate(dim.name)", "index = index + self.coordinate(dim.name)", (RANKS + "::test_coordinates_of_ranks_that_see_the_same_data",)),
    Mutant("maximum-is-a-sum", WORLD, "torch.maximum, dist.ReduceOp.MAX", "torch.add, dist.ReduceOp.SUM", (RANKS + "::test_the_collectives_of_a_world",)),
    Mutant("copies-share-their-sums", WORLD, "dist.ReduceOp.SUM, self.replica_group)", "dist.ReduceOp.SUM)", (RANKS + "::test_the_collectives_of_a_world",)),
    Mutant("a-good-step-forgives-nothing", GUARD, "            self._skipped = 0\n            return\n", "            return\n", (FINITE + "::test_too_many_successive_bad_steps_end_the_run_across_restarts",)),
    Mutant("infinite-norms-are-fine", "core/api/observe/deferred_reports.py", " and math.isfinite(step.grad_norm.item())", "", (FINITE + "::test_a_step_that_is_not_finite_is_skipped_reported_or_ends_the_run",)),
    Mutant("eleven-bad-steps", GUARD, "if self._skipped == MOST_SKIPPED:", "if self._skipped > MOST_SKIPPED:", (FINITE + "::test_too_many_successive_bad_steps_end_the_run_across_restarts",)),
    Mutant("bad-steps-forgotten-at-restart", GUARD, "self._skipped = state.get(STATE, 0)", "self._skipped = 0", (FINITE + "::test_too_many_successive_bad_steps_end_the_run_across_restarts",)),
    # -- validation
    Mutant("validation-with-dropout", "core/loop/validation.py", "part.module.eval()", "part.module.train()", (NOISY + "::test_validation_is_without_dropout",)),
    Mutant("validation-at-every-step", "core/loop/validation.py", "step % self._section.freq == 0", "step % self._section.freq >= 0", (PARTS + "::test_validation_is_due_at_its_frequency_and_at_the_end_once",)),
    Mutant("validation-of-one-batch", "core/loop/validation.py", "while batches != most:", "while batches < 1:", (VALIDATED,)),
    Mutant("validation-of-the-last-batch", "core/loop/validation.py", "loss += require_scalar(", "loss = require_scalar(", (VALIDATED,)),
    Mutant("validation-per-batch", "core/loop/validation.py", "/ sum(one.weight for one in found)", "/ sum(one.batches for one in found)", (VALIDATED,)),
    Mutant("validation-sets-read-together", "core/loop/validation.py", "self._report(step, name, [one], dataset)", "self._report(step, name, found, dataset)", ("tests/parallel/test_validation_sets.py",)),
    # -- optimizer
    Mutant("betas-swapped", ADAM, "betas=(section.beta1, section.beta2)", "betas=(section.beta2, section.beta1)", (ORACLE,)),
    Mutant("adam-for-adamw", ADAM, "return _build(AdamW, FusedAdamW, context)", "return _build(Adam, FusedAdam, context)", (ORACLE,)),
    Mutant("adamw-for-adam", ADAM, "return _build(Adam, FusedAdam, context)", "return _build(AdamW, FusedAdamW, context)", (ORACLE,)),
    Mutant("eps-by-default", ADAM, "        eps=section.eps,\n", "", (ORACLE,)),
    Mutant("fused-by-no-name", ADAM, 'section.implementation in ("auto", "fused")', 'section.implementation == "fused"', (OPTIM, MODEL),
           ),
    Mutant("foreach-ignored", ADAM, 'foreach=section.implementation == "foreach"', "foreach=False", (OPTIM, MODEL)),
    Mutant("groups-without-decay", GROUPS, '"weight_decay": self.weight_decay}', '"weight_decay": 0.0}', (ORACLE,)),
    Mutant("groups-with-the-default-decay", GROUPS, ', "weight_decay": self.weight_decay}', "}", (ORACLE,)),
    Mutant("groups-with-the-default-rate", GROUPS, "lr * self.lr_scale", "lr", (ORACLE,)),
    Mutant("scale-of-the-rate-ignored", GROUPS, "ParamGroup(spec.lr_scale", "ParamGroup(1.0", (OPTIM,)),
    Mutant("last-pattern-decides", GROUPS, "zip(specs, groups, strict=True) if matches", "reversed(list(zip(specs, groups, strict=True))) if matches", (OPTIM,)),
    Mutant("frozen-parameters-train", GROUPS, "if tensor.requires_grad:", "if True:", (OPTIM,)),
    Mutant("rest-comes-last", GROUPS, "for group in (rest, *groups, undecayed) if group.parameters]", "for group in (*groups, undecayed, rest) if group.parameters]", (ORACLE,)),
    Mutant("role-of-a-bias-missed", GROUPS, ' or name.endswith("bias")', "", (OPTIM,)),
    Mutant("stacks-taken-for-matrices", GROUPS, "if parameter.dim() == 2 else", "if parameter.dim() >= 2 else", (OPTIM,)),
    Mutant("head-taken-for-an-embedding", GROUPS, "ParameterRole.HEAD if in_head else", "ParameterRole.EMBEDDING if in_head else", (OPTIM,)),
    # -- schedule
    Mutant("schedule-a-step-early", SCHEDULE, "return (step + 1) / warmup", "return min(1.0, (step + 2) / warmup)", (OPTIM,)),
    Mutant("schedule-a-step-late", SCHEDULE, "return (step + 1) / warmup", "return step / warmup", (OPTIM,)),
    Mutant("decay-a-step-early", SCHEDULE, "plateau_end = steps + 1 - decay", "plateau_end = steps - decay", (OPTIM,)),
    Mutant("decay-without-a-floor", SCHEDULE, "return section.min_lr_factor + (1.0 - section.min_lr_factor) * factor", "return factor", (OPTIM,)),
    Mutant("decay-clamped-at-the-floor", SCHEDULE, "return section.min_lr_factor + (1.0 - section.min_lr_factor) * factor", "return max(section.min_lr_factor, factor)", (OPTIM,)),
    Mutant("sqrt-is-a-square", SCHEDULE, "1.0 - math.sqrt(progress)", "1.0 - progress**2", (OPTIM,)),
    Mutant("cosine-of-a-whole-turn", SCHEDULE, "math.cos(math.pi * progress)", "math.cos(2 * math.pi * progress)", (OPTIM,)),
    Mutant("warmup-longer-than-training", SCHEDULE, "warmup = min(section.warmup_steps, steps)", "warmup = section.warmup_steps", (OPTIM,)),
    Mutant("decay-runs-into-the-warmup", SCHEDULE, "min(room, round(steps * section.decay_ratio))", "round(steps * section.decay_ratio)", (OPTIM,)),
    # -- models
    Mutant("mask-lets-documents-meet", MASK, "own)[:, :, None] == documents[:, None, :]", "own)[:, :, None] >= documents[:, None, :]", (ORACLE,)),
    Mutant("mask-is-not-causal", MASK, " & (distance >= 0)\n", "\n", (ORACLE,)),
    Mutant("mask-sees-one-ahead", MASK, "& (distance >= 0)\n", "& (distance >= -1)\n", (ORACLE,)),
    Mutant("block-of-one-query-is-full", MASK, "first >= key_last", "last >= key_last", (BLOCKS,)),
    Mutant("cut-off-block-is-full", MASK, "& whole\n", "\n", (BLOCKS,)),
    Mutant("block-of-a-window-is-full", MASK, "every & (last - key_first < window)", "every", (BLOCKS,)),
    Mutant("window-is-one-longer", "core/api/model/dense_attention.py", "places - others < window", "places - others <= window", (VARIANTS,)),
    Mutant("keys-before-the-sequence", "core/api/model/dense_attention.py", " & (starts + others >= 0)", "", (VARIANTS,)),
    Mutant("cache-keeps-one-less", "core/api/model/decoding.py", "positions > ends - slots", "positions > ends - slots + 1", (VARIANTS,),
           equivalent="the query after the last position no longer sees the first of so many"),
    Mutant("cap-is-a-clamp", "core/api/model/dense_attention.py", "softcap * torch.tanh(scores / softcap)", "scores.clamp(-softcap, softcap)", (VARIANTS,)),
    Mutant("mask-made-again", "core/api/parallel/microbatch.py", "if self.masks or self.packed is not None:", "if False:", (BLOCKS,)),
    Mutant("packed-window-one-too-long", PACKED, "else window - 1, 0)", "else window, 0)", (VARLEN,)),
    Mutant("packed-documents-of-the-first-sequence", PACKED, "(ends + starts[:, None])", "ends", (VARLEN,)),
    Mutant("packed-without-empty-documents", "core/data/batches.py", "numpy.full((rows, _power_of_two(max(map(len, ends)), 8)), length", "numpy.full((rows, max(map(len, ends))), length", (VARLEN,)),
    Mutant("packed-document-longer-than-said", "core/data/batches.py", "min(length, _power_of_two(longest, 256))", "min(length, 128)", (VARLEN,)),
    Mutant("packed-attention-of-fp32", PACKED, " and q.dtype in _TYPES", "", (VARLEN,)),
    Mutant("whole-sequences-not-causal", ATTENTION, "is_causal=True, scale", "is_causal=False, scale", (ORACLE,)),
    Mutant("first-batch-transform-alone", PART, "            batch = _batch(transform(batch), transform)\n", "            return transform(batch)\n", (MODEL,)),
    Mutant("positions-dropped", PART, '"positions": batch.positions, ', "", (MODEL,)),
    Mutant("weights-of-one-name", "core/model/random_values.py", 'f"{seed}:{name}"', 'f"{seed}"', (VALUES,)),
    Mutant("weights-of-one-seed", "core/model/random_values.py", 'f"{seed}:{name}"', 'f"{name}"', (VALUES,)),
    Mutant("limit-of-truncation-ignored", "core/model/random_values.py", "centred * math.erf(limit / math.sqrt(2.0))", "centred", (VALUES,)),
    Mutant("words-of-the-next-counter", "core/model/random_values.py", "counters = (starts // 4)[:, None]", "counters = (starts // 4 + 1)[:, None]", (MODEL + "::test_each_element_has_the_random_word_of_its_index",)),
    Mutant("nine-rounds", "core/model/random_values.py", "_ROUNDS = 10", "_ROUNDS = 9", (VALUES,)),
    Mutant("buffers-not-computed", "core/model/materialise.py", "            buffer.copy_(found)\n", "            buffer.zero_()\n", (ORACLE,)),
    Mutant("offset-of-shards-ignored", "core/model/materialise.py", "return tensor.to_local(), global_offset(tensor)", "return tensor.to_local(), (0,) * tensor.dim()", ("tests/parallel/test_equivalence.py::test_training_is_that_of_one_device[FSDP 2-none]",)),
    Mutant("parts-in-evaluation-mode", "core/model/build.py", "part.module.train()", "part.module.eval()", (NOISY + "::test_each_microbatch_is_one_forward_pass",)),
    # -- observation
    Mutant("observers-draw", "core/toolkit/random_state.py", "stack.callback(random.setstate, random.getstate())", "pass", (NOISY + "::test_observers_change_nothing_that_training_draws",)),
    Mutant("observers-draw-torchs", "core/toolkit/random_state.py", "stack.enter_context(torch.random.fork_rng(devices))", "pass", (NOISY + "::test_observers_change_nothing_that_training_draws",)),
    # -- plans
    Mutant("microbatches-of-one-rank", "core/job/batch_plan.py", "size // (local * ranks), ranks", "size // local, ranks", (MODEL,)),
    Mutant("shards-not-of-whole-ranks", "core/job/batch_plan.py", "if shards % ranks or size % shards:", "if size % shards:", (MODEL,)),
    Mutant("batch-degree-with-the-sequence", "core/api/parallel/mesh.py", 'if dim.divides == "batch")', 'if dim.divides in ("batch", "sequence"))', (MODEL,)),
    Mutant("experts-summed-over-their-own-view", "core/api/parallel/job_mesh.py", "= view.remainder", "= view.name", (VIEWS + "::test_which_ranks_see_different_data",)),
    Mutant("a-view-borrows-equal-positions", "core/job/mesh_plan.py", "return dim.whole_positions_key is None or bool(", "return dim.whole_positions_key is None and bool(", (VIEWS + "::test_a_view_borrows_ranks_that_divide_weights_where_their_positions_differ",)),
    Mutant("a-view-borrows-weights-first", "core/api/parallel/mesh.py", "if list(view.borrows[: len(data)]) != data or not data:", "if not data:", (VIEWS + "::test_impossible_views_are_refused",)),
    Mutant("a-view-borrows-any-weights", "core/api/parallel/mesh.py", 'view.folds_weights and known[name].divides == "weights"', 'known[name].divides == "weights"', (VIEWS + "::test_impossible_views_are_refused",)),
    Mutant("divided-over-a-view-and-its-dimension", "core/api/parallel/job_mesh.py", "(both := [name for name in view.borrows if name in names])", "(both := [])", (VIEWS + "::test_which_ranks_see_different_data",)),
    Mutant("a-view-multiplies-the-world", "core/api/parallel/mesh.py", "return math.prod(self.degrees.values())", "return math.prod([*self.degrees.values(), *self.view_degrees.values()])", (VIEWS + "::test_a_view_does_not_multiply_the_world",)),
    Mutant("copies-are-summed-over", "core/api/parallel/mesh.py", 'return self.divides in ("batch", "sequence") and not self.diverges', 'return self.divides in ("batch", "sequence")', (VIEWS + "::test_impossible_views_are_refused",)),
    Mutant("batch-of-the-wrong-dimension", "core/api/parallel/mesh.py", 'MeshDim("cp", "parallelism.context_parallel_degree", "sequence")', 'MeshDim("cp", "parallelism.context_parallel_degree", "batch")', (MODEL,)),
    # -- frozen parameters
    Mutant("nothing-frozen", FREEZE, "parameter.requires_grad_(False)", "pass", (FREEZE_TESTS + "::test_training_is_that_of_a_loop_in_torch",)),
    Mutant("frozen-by-a-pattern-without-a-match", FREEZE, "if not any(matches(name, [pattern]) for name in names):", "if False:", (FREEZE_TESTS + "::test_a_mistake_is_one_clear_error",)),
    Mutant("everything-frozen", FREEZE, "if frozen and not trained and", "if False and", (FREEZE_TESTS + "::test_a_mistake_is_one_clear_error",)),
    Mutant("later-stages-freeze-unchecked", FREEZE, "for stage in job.stages:", "for stage in job.stages[:1]:", (FREEZE_TESTS + "::test_a_mistake_in_a_later_stage_is_found_before_the_first_step",)),
    Mutant("models-without-anything-to-train", FREEZE, "if not any(parameter.requires_grad for parameter in model.parameters()):", "if False:", (OPTIM,)),
    Mutant("frozen-modules-count-nothing", FREEZE, "module.register_forward_hook(_require_grad)", "pass", ("tests/integration/test_statistics.py::test_modules_before_the_first_trained_parameter_count",)),
    Mutant("ranks-without-groups", GROUPS, "if group.parameters] or [rest]", "if group.parameters]", (OPTIM,)),
    Mutant("numbers-of-blocks-are-choices", "core/model/stand_in.py", "and (name, key) not in numbers", "", ("tests/core/test_stand_in.py",)),
    Mutant("choices-are-numbers-of-blocks", "core/model/stand_in.py", "len(same) > 2 and all(same)", "any(same)", ("tests/core/test_stand_in.py",)),
    Mutant("frozen-blocks-are-like-others", "core/model/stand_in.py", "one.dtype, one.requires_grad)", "one.dtype)", (FREEZE_TESTS + "::test_blocks_that_are_frozen_are_of_a_kind_of_their_own",)),
    Mutant("frozen-matrices-have-gradients", "core/api/model/_trained_flops.py", "return 1 + matrix.trained + reaches", "return 2 + reaches", ("tests/core/test_trained_flops.py",)),
    Mutant("gradients-before-what-is-trained", "core/api/model/_trained_flops.py", "place > self._first or", "place >= 0 or", ("tests/core/test_trained_flops.py",)),
    Mutant("scores-before-what-is-trained-go-backward", "core/api/model/_trained_flops.py", "self._units.index(unit) < self._first", "False", ("tests/core/test_trained_flops.py",)),
    Mutant("tied-matrices-trained-under-their-other-name", "core/api/model/_trained_flops.py", "name in shared or matches(name, frozen)", "matches(name, frozen)", ("tests/core/test_trained_flops.py",)),
    Mutant("tied-outputs-are-no-product", "core/api/model/_trained_flops.py", "**layout.tied}  # name", "}  # name", ("tests/core/test_trained_flops.py",)),
    Mutant("a-token-uses-all-experts", "core/api/model/_trained_flops.py", "shares.get(self._unit(name), 1.0)", "1.0", ("tests/models_qwen3/test_qwen3_moe.py",)),
    Mutant("a-job-is-freed-by-half", "core/loop/gc_settings.py", "_NESTED = 4", "_NESTED = 1", ("tests/core/test_process_as_before.py",)),
)  # fmt: skip
