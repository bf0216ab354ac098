"""Mistakes in the optimizers of titan-optim."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

MUON_TESTS, BF16_TESTS = "tests/optim/test_muon.py", "tests/optim/test_adamw_bf16.py"
MUON, MATRICES, EXCHANGE = (f"optim/{name}.py" for name in ("muon", "matrices", "exchange"))

AVERAGES_TESTS = "tests/optim/test_averages.py"
AVERAGES = "optim/averages.py"
ON_HOST = "optim/averages_on_host.py"
AVERAGES_ON_MESHES = "tests/integration/test_averages.py"
AVERAGES_ON_CUDA = f"{AVERAGES_TESTS}::test_streams_wait_for_each_other"
MUP, MUP_RULES, MUP_TESTS = "optim/mup.py", "optim/mup_rules.py", ("tests/optim/test_mup.py",)
PHASES, PHASES_CONFIG, PHASES_TESTS = "optim/lr_phases.py", "optim/lr_phases_config.py", ("tests/optim/test_lr_phases.py",)

NOTHING = ("tests/integration/test_freeze.py::test_a_rank_without_parameters_to_train_builds_any_optimizer",)

MUTANTS = (
    Mutant("averages-begin-at-zero", AVERAGES, "torch.where(states > 1, 1 - self._section.decay, 1.0)", "1 - self._section.decay * states.new_ones(())", (AVERAGES_TESTS,)),
    Mutant("averages-of-every-step", AVERAGES, " or after % self._section.freq", "", (AVERAGES_TESTS,)),
    Mutant("averages-of-skipped-steps", AVERAGES, "torch.as_tensor(~report.skipped if isinstance(report.skipped, Tensor) else True, device=self._states.device)", "torch.as_tensor(True, device=self._states.device)", (AVERAGES_TESTS,)),
    Mutant("averages-in-narrow-types", AVERAGES, "torch.promote_types(tensor.dtype, torch.float32)", "tensor.dtype", (AVERAGES_TESTS,)),
    Mutant("averages-on-the-device-after-all", AVERAGES, "        if context.section.enable_cpu_offload:\n", "        if False:\n", (f"{AVERAGES_ON_MESHES}::test_averages_on_the_host_take_none_of_the_devices_memory", AVERAGES_TESTS)),
    Mutant("averages-on-the-host-of-changed-buffers", AVERAGES, "newest if isinstance(tensor, nn.Parameter) else newest.clone()", "newest", (AVERAGES_TESTS,)),
    Mutant("averages-on-the-host-in-narrow-pieces", ON_HOST, "moved.lerp_(piece.to(average.dtype), by)", "moved.mul_(1 - by).add_(piece * by)", (AVERAGES_TESTS,)),
    Mutant("averages-on-the-host-one-piece-only", ON_HOST, "                kept.copy_(moved, non_blocking=self._pinned)\n", "                kept.copy_(moved, non_blocking=self._pinned)\n                break\n", (AVERAGES_TESTS,)),
    Mutant("averages-of-memory-in-use-again", ON_HOST, "self._used = [weight, *(newest for _, newest in pairs)]", "self._used = []", (AVERAGES_TESTS,)),
    Mutant("averages-on-the-host-read-too-early", ON_HOST, "            self._done.synchronize()\n", "            pass\n", (AVERAGES_ON_CUDA,)),
    Mutant("averages-of-weights-that-change", ON_HOST, "wait_event(self._done)", "wait_event(self)", (AVERAGES_ON_CUDA,)),
    Mutant("averages-taken-before-the-update", ON_HOST, "        self._stream.wait_stream(torch.cuda.current_stream(self._device))\n", "", (AVERAGES_ON_CUDA,)),
    Mutant("averages-without-buffers", AVERAGES, "if name in kept and one.is_floating_point()", "if False", (AVERAGES_TESTS,)),
    Mutant("averages-stay-in-the-model", AVERAGES, "            self._replace(kept)\n", "            pass\n", (AVERAGES_TESTS,)),
    Mutant("averages-with-outdated-scales", AVERAGES, "                recompute()\n", "                pass\n", (AVERAGES_TESTS,)),
    Mutant("averages-of-nothing-validated", AVERAGES, " or not self._states.item()", "", (AVERAGES_TESTS,)),
    Mutant("muon-patterns-unchecked", MATRICES, "if not any(matches(name, [pattern]) for name in names):", "if False:", (MUON_TESTS,)),
    Mutant("muon-no-nesterov", MUON, "if self._section.nesterov:", "if False:", (MUON_TESTS,)),
    Mutant("muon-skipped-gradient-kept", MUON, "if self._skip is None else torch.where(self._skip, momentum, gradient)", "", (MUON_TESTS,)),
    Mutant("muon-decay-forgotten", MUON, "parameter.mul_(1 - lr * weight_decay).add_(", "parameter.add_(", (MUON_TESTS,)),
    Mutant("muon-plan-kept-without-a-gradient", MUON, "[*map(id, self._planned[0])] != [*map(id, trained)]", "False", (MUON_TESTS,)),
    Mutant("muon-stack-as-one-matrix", MUON, "x.norm(dim=(1, 2), keepdim=True)", "x.norm()", (MUON_TESTS,)),
    Mutant("muon-tall-not-transposed-back", MUON, "return x if wide else x.mT", "return x.reshape(matrices.shape)", (MUON_TESTS,)),
    Mutant("muon-parts-scaled-alike", MUON, " * (scale / max(scales))", "", (MUON_TESTS,)),
    Mutant("muon-fused-as-one", MUON, "if len(parts) == 1:", "if True:", (MUON_TESTS,)),
    Mutant("muon-strided-shards-joined-last", EXCHANGE, "return [*replicas, *strided, *reversed(plain)]", "return [*replicas, *reversed(plain), *strided]", (MUON_TESTS,)),
    Mutant("muon-shards-joined-outermost-first", EXCHANGE, "*reversed(plain)]", "*plain]", (MUON_TESTS,)),
    Mutant("muon-one-owner-of-all", EXCHANGE, "heapq.heappush(loads, (load + _cost(matrices), owner))", "heapq.heappush(loads, (load, owner))", (MUON_TESTS,)),
    Mutant("muon-experts-exchanged", EXCHANGE, "        if dim == matrices.stack:\n            continue\n", "", (MUON_TESTS,)),
    Mutant("bf16-state-rounded-to-nearest", "optim/adamw_bf16.py", "((values.view(torch.int32) + bits) & -0x10000)", "(values.view(torch.int32) + 0 * bits)", (BF16_TESTS,)),
    Mutant("bf16-state-cut-off", "optim/adamw_bf16.py", "(values.view(torch.int32) + bits)", "values.view(torch.int32)", (BF16_TESTS,)),
    Mutant("bf16-bits-of-local-rows", "optim/adamw_bf16.py", "torch.arange(first, first + size, device=shard.device)", "torch.arange(size, device=shard.device)", (BF16_TESTS,)),
    Mutant("bf16-bits-of-local-columns", "optim/adamw_bf16.py", "return global_offset(parameter)[-1] if", "return 0 if", (BF16_TESTS,)),
    Mutant("bf16-same-bits-in-each-step", "optim/adamw_bf16.py", " ^ step.to(torch.int64)", "", (BF16_TESTS,)),
    Mutant("bf16-skipped-step-counted", "optim/adamw_bf16.py", "if self._skip is None else (~self._skip).to(state[\"step\"])", "", (BF16_TESTS,)),
    Mutant("phases-one-step-late", PHASES, "bisect_right(spans, step,", "bisect_left(spans, step,", PHASES_TESTS),
    Mutant("phases-forget-the-rest-of-tokens", PHASES, "exact = begin + length if phase.tokens is not None else tokens(first)", "exact = tokens(first)", PHASES_TESTS),
    Mutant("phases-in-tokens-from-zero", PHASES, "exact = begin + length if phase.tokens is not None else tokens(first)", "exact = exact + (phase.tokens or 0)", PHASES_TESTS),
    Mutant("phases-in-tokens-by-step", PHASES, "span.factor(step if span.phase.tokens is None else tokens(step))", "span.factor(step)", PHASES_TESTS),
    Mutant("phases-law-since-the-phase", PHASES, "start * (place / self.begin)", "start * (place - self.begin + 1)", PHASES_TESTS),
    Mutant("phases-polynomial-reversed", PHASES, "(1.0 - part) ** (phase.exponent or 1.0)", "(1.0 - part ** (phase.exponent or 1.0))", PHASES_TESTS),
    Mutant("phases-short-of-training", PHASES, "if last.end is not None and last.end < steps:", "if False:", PHASES_TESTS),
    Mutant("phases-without-a-step", PHASES, "if span.end == span.first:", "if False:", PHASES_TESTS),
    Mutant("phases-jump-unasked", PHASES_CONFIG, "if not phase.jump and phase.start_factor != before:", "if False:", PHASES_TESTS),
    Mutant("phases-open-in-the-middle", PHASES_CONFIG, "if phase.open_ended and not last:", "if False:", PHASES_TESTS),
    Mutant("schedule-unchecked", "core/job/assemble.py", "for one in (objective, lr_schedule) if", "for one in (objective,) if", ("tests/core/test_build_context.py", *PHASES_TESTS)),
    Mutant("schedule-keys-unnoted", "core/job/checks.py", "value != default", "False", PHASES_TESTS),
    Mutant("mup-one-rate", MUP_RULES, "WidthRule(ratio**0.5 if 0 in widths else ratio, ratio)", "WidthRule(ratio**0.5 if 0 in widths else ratio)", MUP_TESTS),
    Mutant("mup-output-like-hidden", MUP_RULES, "ratio**0.5 if 0 in widths else ratio", "ratio**0.5", MUP_TESTS),
    Mutant("mup-embedding-like-output", MUP_RULES, "or not widths or matches(", "or not widths or False and matches(", MUP_TESTS),
    Mutant("mup-values-unscaled", MUP_RULES, "value.std * factor", "value.std", MUP_TESTS),
    Mutant("mup-heads-of-any-width", MUP_RULES, "if mixer.heads * base.dim != other.heads * layout.dim:", "if False:", MUP_TESTS),
    Mutant("mup-stacks-of-any-widths", MUP_RULES, "if len(widths) != 2 or len(ratios) > 1:", "if False:", MUP_TESTS),
    Mutant("mup-decays-by-width", MUP, "group.weight_decay / factor", "group.weight_decay", MUP_TESTS),
    Mutant("mup-reports-a-narrow-rate", MUP, "key=lambda pair: pair[0] != 1.0", "key=lambda pair: pair[0]", MUP_TESTS),
    Mutant("mup-of-tied-weights", "optim/checks.py", "    if tied:\n", "    if False:\n", MUP_TESTS),
    Mutant("mup-check-compares-nothing", "optim/mup_check_command.py", "(after[name] - before).abs()", "after[name].abs()", MUP_TESTS),
    Mutant("averages-of-this-stage-only", AVERAGES, "if parameter.requires_grad or thaws:", "if parameter.requires_grad:", ("tests/integration/test_freeze.py::test_stages_that_freeze_and_unfreeze_resume_on_other_meshes",)),
    Mutant("muon-without-groups", MUON, ' or groups[:1]', "", NOTHING),
    Mutant("mup-without-groups", MUP, " or [(1.0, group.parameters)]", "", NOTHING),
)  # fmt: skip
